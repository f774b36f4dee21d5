"""Which curves are drawn, and that few points keep what many say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from modicum.report.charts import CHARTS, STRETCHES, charts, payload
from modicum.report.columns import StepColumns
from modicum.report.folder import FolderContents


def run(rows: list[dict[str, Any]], checked: list[dict[str, Any]] | None = None) -> FolderContents:
    return FolderContents(
        Path("x"), metrics=StepColumns(rows), evaluations=StepColumns(checked or [])
    )


def test_a_column_that_nobody_named_has_a_chart_after_the_others() -> None:
    names = ["tokens", "accuracy", "seconds", "loss", "skipped", "accuracy"]
    assert [chart.title for chart in charts(names)] == ["Loss", "Accuracy"]
    assert charts(["loss"]) == [CHARTS[0]]


def test_short_runs_are_drawn_point_by_point() -> None:
    rows = [{"step": s, "loss": 1 / s, "tokens": 10, "seconds": 0.5} for s in range(1, 301)]
    drawn = payload([run(rows, [{"step": 0, "loss": 2.0}, {"step": 150, "loss": 1.0}])])["runs"][0]
    curve = drawn["metrics"]["loss"]
    assert curve["value"] == [row["loss"] for row in rows]
    assert curve["tokens"] == [10 * row["step"] for row in rows]
    assert curve["seconds"] == [0.5 * row["step"] for row in rows]
    assert (curve["every"], curve["mean"]) == (1, None)
    assert drawn["evaluations"]["loss"]["tokens"] == [0, 1500]
    assert drawn["end"] == {"step": 300, "tokens": 3000, "seconds": 150.0}


def test_of_long_runs_every_extreme_and_the_means_are_kept() -> None:
    rows = [{"step": s, "loss": float(s % 7)} for s in range(10_000)]
    rows[5000]["loss"], rows[9999]["loss"] = -3.0, 7.5
    curve = payload([run(rows)])["runs"][0]["metrics"]["loss"]
    assert len(curve["value"]) <= 2 * STRETCHES + 2
    assert curve["step"] == sorted(curve["step"])
    points = dict(zip(curve["step"], curve["value"], strict=True))
    assert points[5000] == -3.0
    assert points[9999] == 7.5
    assert all(rows[step]["loss"] == value for step, value in points.items())
    assert curve["every"] == 10
    stretch = [row["loss"] for row in rows[20:30]]
    assert curve["mean"]["value"][2] == pytest.approx(sum(stretch) / 10)


def test_a_stretch_has_its_own_points_and_one_on_each_side() -> None:
    rows = [{"step": s, "loss": float(s)} for s in range(10_000)]
    curve = payload([run(rows)], 4000, 4100)["runs"][0]["metrics"]["loss"]
    assert curve["step"] == list(range(3999, 4102))


def test_a_loss_that_is_no_number_is_not_drawn() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": math.nan},
        {"step": 3, "loss": None},
        {"step": 4, "loss": "x"},
        {"step": 5, "loss": 9.0, "skipped": True},
        {"loss": 1.0},
    ]
    drawn = payload([run(rows)])["runs"][0]
    assert drawn["metrics"]["loss"]["step"] == [1]
    assert [(event["step"], event["kind"]) for event in drawn["events"]] == [(5, "skipped")]


def test_events_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-00000007").mkdir(parents=True)
    (tmp_path / "checkpoints/.step-9").mkdir()
    contents = FolderContents(
        tmp_path,
        run={"best": {"step": 5}, "stopped_early": 9},
        plans=[
            {"surgery": {"step": 3, "why": "ranks shrink"}},
            {"ended": {"step": 4, "section": "transform", "why": "the loss falls slowly"}},
        ],
    )
    events = payload([contents])["runs"][0]["events"]
    assert [(event["step"], event["kind"]) for event in events] == [
        (3, "surgery"), (4, "ended"), (5, "best"), (7, "checkpoint"), (9, "stopped"),
    ]  # fmt: skip
    assert events[0]["text"] == "layers changed: ranks shrink"
