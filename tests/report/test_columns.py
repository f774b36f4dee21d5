"""Rows of files that grow, as columns of numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.report.columns import StepColumns
from modicum.report.lines import GrowingFile, objects

ROWS = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 9)},
        optional={
            "loss": st.none() | st.floats() | st.text(max_size=1),
            "accuracy": st.integers(-(10**400), 10**400),
        },
    )
)


@given(rows=ROWS, split=st.integers(0, 20))
def test_what_was_written_last_of_a_step_counts(rows: list[dict[str, Any]], split: int) -> None:
    columns = StepColumns(rows[:split])
    columns.extend(rows[split:])
    latest = {row["step"]: row for row in rows}
    assert list(columns.steps) == sorted(latest)
    kept = [latest[step] for step in sorted(latest)]
    finite = [
        (place, value)
        for place, row in enumerate(kept)
        if isinstance(value := row.get("loss"), float) and math.isfinite(value)
    ]
    assert list(zip(*columns.points("loss"), strict=True)) == finite


def test_sums_know_of_gaps() -> None:
    columns = StepColumns([{"step": 1, "tokens": 5}, {"step": 2}, {"step": 3, "tokens": 2, "x": 1}])
    assert columns.running("tokens").tolist() == [5.0, 5.0, 7.0]
    assert columns.running("x").tolist() == [0.0, 0.0, 1.0]
    assert columns.running("absent").tolist() == [0.0, 0.0, 0.0]
    assert (columns.total("tokens"), columns.total("absent")) == (7.0, None)
    assert (columns.greatest("tokens"), columns.greatest("absent")) == (5.0, None)
    assert (columns.last("tokens"), columns.last("absent")) == (2.0, None)
    assert columns.points("x") == ([2], [1.0])
    assert columns.between(2, 3) == (1, 3)


@pytest.mark.parametrize("odd", [None, True, "x", math.inf, math.nan, 10**400])
def test_rows_taken_in_at_once_are_those_of_one_by_one(
    odd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [
        [{"step": s, "loss": 1 / s, "tokens": 3} for s in (1, 2, 3)],
        [{"step": s, "loss": 1 / s, "new": s} for s in (4, 5)],
        [{"step": s, "loss": 1 / s, "tokens": 4} for s in (6, 7)],
        [{"step": 8, "loss": 0.5}, {"step": 9, "loss": odd}],
        [{"step": s, "loss": 2.0} for s in (7, 10)],
        [],
    ]

    def found() -> dict[str, Any]:
        columns = StepColumns()
        for rows in parts:
            columns.extend(rows)
        points = {name: columns.points(name) for name in columns.names}
        return points | {"steps": list(columns.steps)}

    at_once = found()
    assert at_once["loss"][0] == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert at_once["loss"][1][6] == 2.0  # what was written last of step 7
    assert at_once["tokens"] == ([0, 1, 2, 5], [3.0, 3.0, 3.0, 4.0])
    monkeypatch.setattr(StepColumns, "_took_at_once", lambda self, rows: False)
    assert found() == at_once


def test_a_row_of_other_names_each_time_does_not_grow_for_ever() -> None:
    columns = StepColumns({"step": step, f"name{step}": 1.0} for step in range(1000))
    assert len(columns.names) == 64
    assert len(columns) == 1000


def test_a_file_gives_what_came_since(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = GrowingFile(path)

    def more() -> list[int]:
        return [row["step"] for rows in file.more() for row in rows]

    assert more() == []
    path.write_text('{"step": 1}\n{"step": 2')
    assert more() == [1]
    with open(path, "a") as handle:
        handle.write('}\nno row\n\n{"step": 3}\n')
    assert more() == [2, 3]
    assert (more(), file.damaged, file.begun) == ([], 1, 1)
    replaced = tmp_path / "new"
    replaced.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(50)))
    replaced.rename(path)
    assert more() == list(range(50))
    assert (file.damaged, file.begun) == (0, 2)


def test_lines_that_are_rows_only_together_are_none() -> None:
    assert objects([b'{"a": 1', b'"b": 2}']) == ([], 2)
    assert objects([b"[1]", b'{"a": 1}', b"{}, {}"]) == ([{"a": 1}], 2)
