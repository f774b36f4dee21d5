from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from modicum.cli import promises
from modicum.cli.promises import run_promises
from modicum.cli.promises_file import Promise, read_promises
from modicum.cli.promises_table import BEGIN, END, PAGE, markdown, with_table
from modicum.core.errors import InputError

SCRIPT = """\
import json, pathlib, sys
runs = pathlib.Path("runs.txt")
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
pathlib.Path("result.json").write_text(json.dumps({"a": {"b": 0.5}, "verdict": "holds"}))
pathlib.Path("result.txt").write_text("half")
rows = [{"sentence": "so it is", "n": 4}, {"name": "bytes", "n": 5}, 6]
print(json.dumps({"n": 3, "rows": rows}))
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(promises, "_machine", lambda: "a machine, 2 cores")
    (tmp_path / "work.py").write_text(SCRIPT)
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return tmp_path


def write(checkout: Path, *entries: dict[str, Any]) -> Path:
    common = {"sentence": "so it is", "command": "python work.py", "bar": "< 1"}
    file = checkout / "promises.yaml"
    # JSON is YAML.
    file.write_text(json.dumps([common | entry for entry in entries]))
    return file


def saved(checkout: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((checkout / promises.RESULTS).read_text())
    return rows


def test_figures_come_from_files_and_output_and_a_command_runs_once(checkout: Path) -> None:
    file = write(
        checkout,
        {"id": "kept", "figure": {"file": "result.json", "key": "a.b"}, "bar": "<= 0.5"},
        {"id": "broken", "figure": {"key": "n"}, "bar": "> 3"},
        {"id": "word", "figure": {"file": "result.json", "key": "verdict"}, "bar": "== holds"},
    )
    rows = run_promises(file)
    assert [(row["id"], row["figure"], row["kept"]) for row in rows] == [
        ("kept", 0.5, True),
        ("broken", 3, False),
        ("word", "holds", True),
    ]
    assert rows == saved(checkout)
    assert {"id", "sentence", "figure", "bar", "kept"} <= rows[0].keys()
    assert (checkout / "runs.txt").read_text() == "x"
    readme = (checkout / "README.md").read_text()
    assert readme == f"before\n{BEGIN}\n{markdown(rows)}{END}\nafter\n"
    assert "| so it is | > 3 | 3 | **no** |" in readme
    assert with_table(readme, rows) == readme


def test_a_figure_in_a_list_is_named_by_its_rows_sentence(checkout: Path) -> None:
    keys = ("rows.so it is.n", "rows.bytes.n")
    entries = [{"id": key[-3:] + key[5], "figure": {"key": key}} for key in keys]
    rows = run_promises(write(checkout, *entries))
    assert [row["figure"] for row in rows] == [4, 5]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"command": "python nowhere.py", "figure": {"key": "n"}}, "exit code 2"),
        ({"command": "no-such-program", "figure": {"key": "n"}}, "could not be run"),
        ({"figure": {"key": "m"}}, "no m in the output"),
        ({"figure": {"key": "n.deeper"}}, "no n.deeper in the output"),
        ({"figure": {"key": "rows.another.n"}}, "no rows.another.n in the output"),
        ({"figure": {"file": "absent.json", "key": "n"}}, "did not write absent.json"),
        ({"figure": {"file": "result.txt", "key": "n"}}, "no JSON in result.txt"),
    ],
)
def test_without_a_figure_a_promise_is_not_kept(
    checkout: Path, entry: dict[str, Any], problem: str
) -> None:
    (row,) = run_promises(write(checkout, {"id": "one"} | entry))
    assert row["figure"] is None
    assert row["kept"] is False
    assert problem in row["problem"]


def test_a_figure_from_an_earlier_run_does_not_count(checkout: Path) -> None:
    old = checkout / "old.json"
    old.write_text('{"n": 0}')
    os.utime(old, (1, 1))
    (row,) = run_promises(
        write(checkout, {"id": "one", "figure": {"file": "old.json", "key": "n"}})
    )
    assert not row["kept"]


def test_a_result_that_is_a_pipe_is_not_waited_for(checkout: Path) -> None:
    os.mkfifo(checkout / "pipe.json")
    place = {"file": "pipe.json", "key": "n"}
    long = {"id": "long", "command": "python", "long": True, "takes": "1 h", "figure": place}
    for row in run_promises(write(checkout, {"id": "one", "figure": place}, long)):
        assert not row["kept"]
        assert "pipe.json" in row["problem"]


LONG = {"long": True, "takes": "15 min", "figure": {"file": "old.json", "key": "n"}}
OLD = {"n": 0, "when": "2026-11-21T14:55:07+00:00", "machine": {"processor": "AMD", "cores": 2}}


def test_a_long_command_is_not_run_its_dated_result_is_read(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "old.json").write_text(json.dumps(OLD))
    figure = {"file": "old.json", "key": "machine.cores"}
    file = write(checkout, {"id": "one"} | LONG, {"id": "two"} | LONG | {"figure": figure})
    rows = run_promises(file)
    assert not (checkout / "runs.txt").exists()
    assert [(row["figure"], row["kept"], row["read"]) for row in rows] == [
        (0, True, True),
        (2, False, True),
    ]
    assert {(row["when"], row["machine"]) for row in rows} == {(OLD["when"], "AMD, 2 cores")}
    readme = (checkout / "README.md").read_text()
    assert "| so it is | < 1 | 0 (measured 2026-11-21) | yes |" in readme
    assert "Measured on: AMD, 2 cores, 2026-11-21." in readme
    said = capsys.readouterr()
    assert said.err.count("15 min") == said.err.count("--long runs it") == 1
    assert "one: 0 (measured 2026-11-21)" in said.out


def test_a_long_command_runs_when_asked_for(checkout: Path) -> None:
    (checkout / "result.json").write_text(json.dumps(OLD))
    figure = {"file": "result.json", "key": "a.b"}
    file = write(checkout, {"id": "one"} | LONG | {"figure": figure})
    (row,) = run_promises(file, only=["one"], long=True)
    assert (checkout / "runs.txt").read_text() == "x"
    assert (row["figure"], row["kept"], row["read"]) == (0.5, True, False)
    assert row["machine"] == "a machine, 2 cores"
    assert "| 0.5 | yes |" in (checkout / "README.md").read_text()


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, "not measured yet: there is no old.json"),
        ("{", "no JSON in old.json"),
        (json.dumps(OLD | {"n": {}}), "no n.m in old.json"),
        ("[]", "no n.m in old.json"),
        (json.dumps({"n": {"m": 0}}), "old.json has no date: no `when` in it"),
    ],
)
def test_a_result_that_cannot_be_read_is_a_promise_not_kept(
    checkout: Path, result: str | None, problem: str
) -> None:
    if result is not None:
        (checkout / "old.json").write_text(result)
    file = write(checkout, {"id": "one"} | LONG | {"figure": {"file": "old.json", "key": "n.m"}})
    (row,) = run_promises(file)
    assert (row["figure"], row["kept"], row["when"]) == (None, False, None)
    assert row["problem"] == problem
    readme = (checkout / "README.md").read_text()
    assert f"| so it is | < 1 | {problem} | **no** |" in readme
    assert "Nothing is measured yet." in readme


def test_a_result_may_be_of_no_one_machine(checkout: Path) -> None:
    (checkout / "old.json").write_text(json.dumps({"n": 0, "when": "2026-11-21"}))
    (row,) = run_promises(write(checkout, {"id": "one"} | LONG))
    assert row["kept"]
    assert row["machine"] is None
    assert "Measured on: 2026-11-21." in (checkout / "README.md").read_text()


def test_readme_has_the_chosen_ones_and_the_page_has_all(checkout: Path) -> None:
    page = checkout / PAGE
    page.parent.mkdir(parents=True)
    page.write_text(f"{BEGIN}\n{END}\n")
    figure = {"figure": {"key": "n"}}
    chosen = {"id": "two", "readme": "in short", "bar": "== 3"} | figure
    rows = run_promises(write(checkout, {"id": "one"} | figure, chosen))
    assert page.read_text() == f"{BEGIN}\n{markdown(rows)}{END}\n"
    readme = (checkout / "README.md").read_text()
    assert "| in short | == 3 | 3 | yes |" in readme
    assert readme.count("| so it is |") == 0
    assert "1 of 2 promises are kept: [every one](docs/reference/promises.md)." in readme


def test_checking_some_keeps_the_rows_of_the_others(checkout: Path) -> None:
    figure = {"figure": {"key": "n"}}
    file = write(checkout, {"id": "one"} | figure, {"id": "two", "bar": "== 3"} | figure)
    run_promises(file)
    (checkout / "work.py").write_text("print('{\"n\": 0}')")
    assert [row["id"] for row in run_promises(file, only=["one"])] == ["one"]
    assert [(row["id"], row["figure"]) for row in saved(checkout)] == [("one", 0), ("two", 3)]
    with pytest.raises(InputError, match="Did you mean 'two'"):
        run_promises(file, only=["twoo"])


@pytest.mark.parametrize(
    ("bar", "figure", "kept"),
    [
        ("< 0.3", 0.3, False),
        ("<= 0.3", 0.3, True),
        (">= 0.98", 0.98, True),
        ("> 0.98", 0.98, False),
        ("== 0", 0, True),
        ("== 0", 1, False),
        ("<= 1e-5", 9e-6, True),
        ("<= 1e-5", float("nan"), False),
        ("== does not hold", "does not hold", True),
        ("== holds", "does not hold", False),
        ("<= 1", "0", False),
        ("<= 1", None, False),
        ("== 1", True, False),
        ("== true", True, True),
        ("== true", False, False),
        ("<= z", 3, False),
    ],
)
def test_bars(bar: str, figure: object, kept: bool) -> None:
    promise = Promise.model_validate(
        {"id": "i", "sentence": "s", "command": "c", "figure": {"key": "k"}, "bar": bar}
    )
    assert promise.kept(figure) is kept


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"id": "one", "figure": {"key": "n"}, "bar": "about 3"}], "not a bar"),
        ([{"id": "one", "figure": {"kee": "n"}}], "promise 1: figure"),
        ([{"id": "one"}], "promise 1: figure"),
        ([{"id": "one", "figure": {"key": "n"}, "bars": "< 1"}], "Did you mean 'bar'"),
        ([{"id": "one", "figure": {"key": "n"}}] * 2, "two promises"),
        ([{"id": "one"} | LONG | {"figure": {"key": "n"}}], "promise one: .* name it"),
        ([{"id": "one"} | LONG | {"takes": ""}], "say about how long"),
        ([{"id": "one"} | LONG, {"id": "two"} | LONG | {"long": False}], "only one of them"),
    ],
)
def test_a_wrong_file_is_refused(
    checkout: Path, entries: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_promises(write(checkout, *entries))


def test_a_missing_file_is_told() -> None:
    with pytest.raises(InputError, match="no such file"):
        read_promises(Path("nowhere.yaml"))


def test_a_command_of_no_words_and_a_figure_of_no_kind_are_not_kept(checkout: Path) -> None:
    result = {"file": "result.json", "key": "a"}
    rows = run_promises(
        write(
            checkout,
            {"id": "none", "command": "", "figure": result},
            {"id": "quote", "command": "python 'x", "figure": result},
            {"id": "object", "figure": result, "bar": "< holds"},
        )
    )
    assert [row["kept"] for row in rows] == [False] * 3
    assert "no words" in rows[0]["problem"]
    assert "closing quotation" in rows[1]["problem"]
