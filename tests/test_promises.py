"""The checkout's promises: the file can be read, and the README says what was measured."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from modicum.cli.promises import RESULTS, figure_at, read_rows
from modicum.cli.promises_file import read_promises
from modicum.cli.promises_table import PAGE, with_chosen, with_table

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "promises.yaml"


def test_every_promise_can_be_read_and_its_script_is_there() -> None:
    for promise in read_promises(FILE):
        program, *words = promise.command.split()
        assert program in ("python", "modicum", "make"), promise.id
        if program == "python":
            assert (ROOT / words[0]).is_file(), promise.id


def test_the_tables_show_the_rows_of_the_last_run() -> None:
    rows, why = read_rows(ROOT / RESULTS), "run `python scripts/readme.py`"
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert with_table(page, rows) == page, why
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    chosen = {promise.id: promise.readme for promise in read_promises(FILE) if promise.readme}
    assert with_chosen(readme, rows, chosen) == readme, why
    assert all(f"| {sentence} |" in readme for sentence in chosen.values())
    assert len(chosen) <= 6 < page.count("| yes |")


def test_the_last_run_checked_the_promises_as_they_stand() -> None:
    rows = read_rows(ROOT / RESULTS)
    if not rows:
        pytest.skip("promises have not been checked in this checkout")
    told = [(row["id"], row["sentence"], row["command"], row["bar"]) for row in rows]
    assert told == [(p.id, p.sentence, p.command, p.bar) for p in read_promises(FILE)]


def test_what_is_read_is_dated_and_has_itsfigure_at() -> None:
    for promise in read_promises(FILE):
        path = ROOT / str(promise.figure.file)
        if promise.long and path.is_file():
            result = json.loads(path.read_text(encoding="utf-8"))
            assert datetime.fromisoformat(result["when"]).year >= 2026, promise.id
            figure_at(result, promise.figure)
