"""Where the time went, as the page, the summary and the last line of a run say it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from modicum import report
from modicum.core import clock
from modicum.report import time_rows

MakeRun = Callable[..., Path]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "where-the-time-went.md"


def test_the_summary_has_groups_that_sum_to_all(make_run: MakeRun) -> None:
    summary = report.summary(make_run())
    time = summary["time"]
    whats = ["start-up", "compute", "data", "wire", "checkpoint", "unexplained"]
    assert [group["what"] for group in time["groups"]] == whats
    assert sum(group["share"] for group in time["groups"]) == pytest.approx(1.0)
    start = time["groups"][0]
    assert {part["what"]: part["seconds"] for part in start["parts"]} == {"other": 1.4, "data": 8.6}
    assert start["seconds"] == pytest.approx(10.0)
    assert time["unexplained"] == pytest.approx(1 / 151.4)
    assert time["ranks"] == [{"what": "wire", "median": 3.5, "most": 4.0, "rank": 1}]
    # What the plan forecasts is the updates alone.
    forecast = summary["comparison"][-1]
    assert (forecast["what"], forecast["predicted"]) == ("Time of the updates", 140.4)
    assert forecast["measured"] == time["updates"] == pytest.approx(137.4)
    assert forecast["difference"] == pytest.approx(137.4 / 140.4 - 1)


def test_a_run_without_rows_has_none(make_run: MakeRun) -> None:
    folder = make_run(time=None)
    assert report.summary(folder)["time"] is None
    assert "Where the time went" not in report.write(folder).read_text()
    assert time_rows.in_words({}) is None


def test_the_page_has_each_row(make_run: MakeRun) -> None:
    text = report.write(make_run()).read_text()
    section = text.partition("Where the time went")[2].partition("</section>")[0]
    cells = re.findall(r"<tr><td>(.*?)</td>", section)
    assert cells == ["start-up", "compute", "data", "wire", "checkpoint", "unexplained", "wire"]
    assert "other 1.4 s, data 8.6 s" in section


def test_the_last_line_says_the_largest_and_what_is_unexplained(make_run: MakeRun) -> None:
    record = json.loads((make_run() / "run.json").read_text())
    assert time_rows.in_words(record, least=0.02) == (
        "time: start-up 6.6 %, compute 87 %, wire 2.6 %, unexplained 0.7 %"
    )


def test_a_start_that_was_repeated_is_not_lost_work() -> None:
    """A stop that saves loses no step: what it costs is the start alone."""
    rows = {"compute/forward": 90.0, clock.AGAIN: 8.0, clock.UNEXPLAINED: 2.0}
    resumed = {"time": {"rows": rows}}
    assert time_rows.in_words(resumed) == (
        "time: compute 90 %, starting again 8.0 %, unexplained 2.0 %"
    )
    killed = {"time": {"rows": rows | {clock.LOST: 100.0}}}
    assert time_rows.in_words(killed) == (
        "time: compute 45 %, starting again 4.0 %, lost work 50 %, unexplained 1.0 %"
    )


def test_the_how_to_names_every_row() -> None:
    table = PAGE.read_text().partition("## What to do")[0]
    shown = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE))
    rows = [value for name, value in vars(clock).items() if name.isupper() and name[0] != "_"]
    for row in rows:
        group, _, part = row.partition("/")
        assert group in shown, row
        assert not part or f"`{part}`" in shown[group], row
