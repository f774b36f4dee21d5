"""Tables: aligned where they are plain, rich only on a terminal, JSON that is strict."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.cli.plain_tables import columns, plain
from modicum.cli.tables import plan_tables, print_plan, print_proof, table


def text(print_it, *values, **options) -> str:
    stream = io.StringIO()
    print_it(*values, stream=stream, **options)
    return stream.getvalue()


def test_columns_are_aligned_numbers_to_the_right() -> None:
    shown = text(table, ("name", "bytes", "why"), [("a", "1.5 MB", "x"), ("漢字", "12 MB", None)])
    assert shown.splitlines() == [
        "name   bytes  why",
        "----  ------  ---",
        "a     1.5 MB  x",
        "漢字   12 MB",
    ]


def test_a_cell_is_one_line_and_no_escape_code_passes() -> None:
    shown = text(table, ("a", "b"), [("two\nlines", "\x1b[31mred")])
    assert shown.splitlines()[2] == "two lines   [31mred"


def test_words_are_broken_only_where_there_is_no_other_way() -> None:
    cells = [("--set data.sequence_length=1024", "keeps all of it, and " * 4)]
    for width in (40, 60):
        shown = plain(("set", "why"), cells, (False, False), width=width).splitlines()
        assert any(line.startswith("data.sequence_length=1024  ") for line in shown)
        assert max(map(columns, shown)) <= width
    shown = plain(("set", "why"), [("x" * 50, "y" * 50)], (False, False), width=40).splitlines()
    assert max(map(columns, shown)) <= 40


PATH = "/home/somebody/projects/adapters-of-mine/src/methods/my_own_lora.py"


@pytest.mark.parametrize("place", [0, 1])
def test_a_path_is_not_broken(place: int) -> None:
    cells = ["why it is so, in many words " * 3] * 2
    cells[place] = f"class MyOwnLoRA in {PATH}"
    shown = plain(("one", "other"), [cells], (False, False), width=60)
    assert PATH in shown
    other = "".join("".join(line.split()) for line in shown.splitlines()[2:])
    assert len(other) == sum(len(cell.replace(" ", "")) for cell in cells)


@pytest.mark.parametrize(("columns", "fits"), [(110, True), (76, False)])
def test_on_a_terminal_a_path_is_not_broken(
    monkeypatch: pytest.MonkeyPatch, columns: int, fits: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [("in Python", f"class MyOwnLoRA in {PATH}", "a reason of several words " * 4)]
    table(("Field", "Value", "why"), rows, stream=stream)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert (PATH in shown) is fits
    assert shown.count("several") == 4  # nothing is lost in either


def test_an_empty_table_is_its_headers() -> None:
    assert text(table, ("a", "b"), []) == "a  b\n-  -\n"


def test_on_a_terminal_nothing_is_read_as_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    table(("field", "why"), [("a.b", "a [bold]long[/bold] reason " * 3)], stream=stream)
    assert "[bold]" in stream.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert max(map(len, plain.splitlines())) <= 40


def test_a_plan_says_what_why_and_cost() -> None:
    plan = {
        "revision": 2,
        "why": "resumed on another machine",
        "choices": [{"field": "training.micro_batch_size", "value": 4, "why": "keeps the budget"}],
        "prediction": {
            "peak_bytes": 500_000_000,
            "process_bytes": 900_000_000,
            "budget_bytes": None,
            "tokens_per_second": None,
            "seconds": 90.0,
            "table": [{"kind": "weight", "phase": "always", "bytes": 1_000_000, "what": "all"}],
        },
        "parameters": {"total": 10, "trainable": 10},
    }
    choices, costs = plan_tables(plan)
    assert choices == [("training.micro_batch_size", 4, "keeps the budget")]
    said = {"choices": [{"field": "checkpoint.asynchronous", "value": True, "why": "it fits"}]}
    assert plan_tables(said)[0] == [("checkpoint.asynchronous", "yes", "it fits")]
    assert costs == [
        ("parameters", "10", ""),
        ("tensors", "500 MB", "at the peak"),
        ("process", "900 MB", "no budget was set"),
        ("time", "1 min 30 s", "of the steps; start, evaluations and saves come in addition"),
    ]
    shown = text(print_plan, plan)
    assert shown.startswith("Plan, revision 2: resumed on another machine\n")
    assert "weight  always  1 MB  all" in " ".join(shown.split("\n")).replace("   ", "  ")


def test_a_plan_for_several_ranks_says_how_they_share_and_what_they_send() -> None:
    plan = {
        "ranks": 4,
        "layout": {"name": "hybrid", "replicas": 2, "shards": 2},
        "prediction": {"peak_bytes": 500_000_000, "wire_bytes": 12_000_000},
    }
    _, costs = plan_tables(plan)
    assert costs == [
        ("ranks", "4", "hybrid, 2 × 2 to a copy of the weights"),
        ("tensors", "500 MB", "at the peak of each rank"),
        (
            "wire",
            "12 MB",
            "sent by each rank in an update; what that takes is not counted, as no link was "
            "measured (modicum bench link)",
        ),
    ]
    most = {"prediction": {"peak_bytes": 500_000_000, "counts_the_most": True}}
    said = "at the peak; the most there may be, until weights are read"
    assert plan_tables(most)[1] == [("tensors", "500 MB", said)]
    whole = plan | {"layout": {"name": "ddp", "replicas": 4, "shards": 1}}
    assert plan_tables(whole)[1][0] == ("ranks", "4", "ddp")
    alone = plan | {"ranks": 1, "prediction": {"wire_bytes": 0}}
    assert plan_tables(alone)[1] == []


def test_a_plan_in_bf16_says_that_fp32_would_be_faster():
    of = {"seconds": 600.0, "seconds_in_fp32": 60.0}
    [(name, time, said)] = plan_tables({"prediction": of})[1]
    assert (name, time) == ("time", "10 min 00 s")
    assert said.endswith("; 1 min 00 s with precision: fp32")


def test_a_proof_shows_its_figures_and_its_verdict_last() -> None:
    result = {
        "name": "lora",
        "verdict": "does not hold",
        "claim_verdict": "in part",
        "against": {"result": "worse", "rival": "LoRA"},
        "reason": "above the threshold",
        "null": True,
        "seconds": 12.3456,
        "figures": [
            {"what": "peak bytes", "method": 10, "baseline": 20, "ratio": 0.5},
            {"what": "loss", "method": 1.25, "threshold": 1.3, "remark": ""},
        ],
    }
    lines = text(print_proof, result).splitlines()
    assert lines[0].split() == ["name", "lora"]
    assert ["seconds", "12.35"] in [line.split() for line in lines]
    assert "what        method  baseline  ratio  threshold" in lines
    assert "loss          1.25                         1.3" in lines
    assert lines[-3:] == [
        "claim verdict: in part",
        "against: worse than LoRA",
        "verdict: does not hold (above the threshold)",
    ]
    assert json.loads(text(print_proof, result, as_json=True)) == result


def test_a_plain_table_imports_neither_rich_nor_torch() -> None:
    script = (
        "import sys; from modicum.cli.method_list import print_methods;"
        "print_methods([{'name': 'lora', 'room': 'adapters'}], False);"
        "heavy = {'rich', 'torch', 'matplotlib', 'jinja2', 'yaml'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 0


# 80 columns


def test_what_is_piped_fits_80_columns_and_loses_no_word() -> None:
    why = "keeps the budget, since " + "each of many words counts " * 6
    rows = [("training.micro_batch_size", 4, why), ("b", 12, "short"), ("漢字" * 30, 1, "x" * 99)]
    shown = text(table, ("choice", "value", "why"), rows)
    assert max(map(columns, shown.splitlines())) <= 80
    joined = " ".join(shown.split())
    for word in why.split():
        assert word in joined
    assert shown.replace("\n", "").replace(" ", "").count("x") == 99
    assert shown.count("漢") == 30
    first = [line.split()[0] for line in shown.splitlines() if line[:1].strip()]
    assert first[:4] == ["choice", "-" * len(first[1]), "training.micro_batch_size", "b"]


@given(
    st.lists(
        st.tuples(st.text("ab 漢", max_size=99), st.text("xyz ", max_size=99), st.integers(0)),
        max_size=4,
    )
)
def test_any_table_fits_and_holds_every_character(rows: list[tuple[str, str, int]]) -> None:
    cells = [(" ".join(a.split()), " ".join(b.split()), str(min(n, 10**9))) for a, b, n in rows]
    shown = plain(("one", "two", "n"), cells, (False, False, True))
    assert max(map(columns, shown.splitlines())) <= 80
    body = "".join("".join(line.split()) for line in shown.splitlines()[2:])
    wanted = "".join("".join(cell.split()) for row in cells for cell in row)
    assert sorted(body) == sorted(wanted)


def test_numbers_do_not_wrap_and_many_columns_stay() -> None:
    headers = [f"column {n}" for n in range(12)]
    shown = plain(headers, [["9" * 20] * 12], [True] * 12)
    assert len(shown.splitlines()) == 3
