"""The fuzzer: what it draws is the same again, and what is wrong it finds. No command is run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACE = (
    'Traceback (most recent call last):\n  File "/x/src/modicum/data/store.py", line 7, in read\n'
    '    1 / 0\n  File "/usr/lib/json.py", line 3, in loads\nValueError: at 17\n'
)


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    names = ("cases", "checks", "mutations", "world", "zygote")
    return SimpleNamespace(**{name: importlib.import_module(f"fuzz_{name}") for name in names})


def test_a_number_draws_the_same_input_and_the_families_all_come(fuzz: Any) -> None:
    drawn = [fuzz.cases.draw(Random(f"1/{number}")) for number in range(150)]
    again = [fuzz.cases.draw(Random(f"1/{number}")) for number in range(150)]
    assert [case.words for case in drawn] == [case.words for case in again]
    assert {case.family for case in drawn} == {
        "recipe", "data", "model", "adapter", "run", "words", "files", "environment",
    }  # fmt: skip
    assert {case.output for case in drawn} == {"out", "full", "closed"}
    assert 0 < sum(case.fresh for case in drawn) < 40


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.safetensors", "a.yaml"])
def test_what_is_spoilt_is_spoilt_alike_and_differs(fuzz: Any, tmp_path: Path, name: str) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    whole = {
        "a.json": b'{"a": [1, {"b": "c"}], "d": null, "e": 2.5}',
        "a.jsonl": b'{"a": 1}\n{"a": 2}\n',
        "a.safetensors": len(header).to_bytes(8, "little") + header + b"\1\2\3\4",
        "a.yaml": b"a: {b: 1}\n",
    }[name]
    made = set()
    for number in range(120):
        outcomes = []
        for _ in range(2):
            (tmp_path / name).write_bytes(whole)
            said = fuzz.mutations.content(Random(number), tmp_path / name)
            outcomes.append(((tmp_path / name).read_bytes(), said))
        assert outcomes[0] == outcomes[1]
        made.add(outcomes[0][0])
    assert len(made - {whole}) > 40


def test_the_world_comes_back_and_what_changed_in_it_is_seen(fuzz: Any, tmp_path: Path) -> None:
    template, world = tmp_path / "template", tmp_path / "world"
    (template / "run").mkdir(parents=True)
    (template / "run" / "a.txt").write_text("a")
    (template / "b.txt").write_text("b")
    for number in range(60):
        fuzz.world.restore(world, template)
        before = fuzz.world.stamps(world)
        fuzz.mutations.place(Random(number), world / ("run" if number % 2 else "b.txt"))
        assert fuzz.world.changed(before, fuzz.world.stamps(world))
    fuzz.world.restore(world, template)
    assert (world / "run" / "a.txt").read_text() == "a"
    assert fuzz.world.changed(before := fuzz.world.stamps(world), before) == []
    (world / "b.txt").write_text("another")
    (world / "run" / "new").mkdir()
    assert fuzz.world.changed(before, fuzz.world.stamps(world)) == ["b.txt", "run/new"]


@pytest.mark.parametrize(
    ("code", "err", "changed", "fault"),
    [
        (0, "", [], None),
        (2, "modicum: no\n", ["out/x", "out"], None),
        (2, "Usage: modicum\nTry it.\n\nError: no such option\n", [], None),
        (1, TRACE, [], "a stack trace: data/store.py:7 read: ValueError: at 0"),
        (0, TRACE, [], "a stack trace: data/store.py:7 read: ValueError: at 0"),
        (None, "", [], "no end in time"),
        (-11, "", [], "ended by signal 11"),
        (1, "oh\n", [], "exit code 1"),
        (3, "modicum: too much\n", [], "exit code 3"),
        (2, "", [], "0 messages"),
        (2, "modicum: one\nmodicum: two\n", [], "2 messages"),
        (2, "modicum: one\nand more\n", [], "a message of several lines"),
        (0, "x.py:3: UserWarning: old\n", [], "a library's warning: x.py:3: UserWarning: old"),
        (0, "", ["outer", "texts/1.py"], "changed outside of its output: outer"),
    ],
)
def test_what_is_wrong_is_found(
    fuzz: Any, code: int | None, err: str, changed: list[str], fault: str | None
) -> None:
    case = fuzz.cases.Case("run", ["train"], outputs=("out",))
    found = fuzz.checks.faults(case, fuzz.zygote.Ended(code, "", err), changed)
    assert found == ([] if fault is None else [fault])


def test_output_that_is_no_strict_json_is_found(fuzz: Any) -> None:
    case = fuzz.cases.Case("run", ["plan", "--json"])
    for out, fine in (('{"a": 1}', True), ('{"a": NaN}', False), ("{", False)):
        assert (fuzz.checks.faults(case, fuzz.zygote.Ended(0, out, ""), []) == []) is fine
