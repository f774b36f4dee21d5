"""The arithmetic behind the plots."""

from __future__ import annotations

import math
import re

import pytest

from modicum.report import plots


def test_smoothing_has_no_bias_at_the_start() -> None:
    assert plots.smooth([3.0] * 5, half_life=2) == pytest.approx([3.0] * 5)
    # One half-life of one value: the last counts twice as much as the one before it.
    assert plots.smooth([0.0, 3.0], half_life=1) == pytest.approx([0.0, 2.0])


def test_thinning_keeps_every_extreme() -> None:
    values = [0.0] * 9999 + [7.0]
    values[5000] = -3.0
    steps, kept = plots.thin(([float(i) for i in range(10_000)], values), count=100)
    assert len(kept) <= 101
    assert steps == sorted(steps)
    assert min(kept) == -3.0
    assert (steps[-1], kept[-1]) == (9999.0, 7.0)
    few = ([1.0, 2.0], [3.0, 4.0])
    assert plots.thin(few) == few


def test_a_loss_that_is_no_number_is_not_drawn() -> None:
    rows = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": math.nan},
        {"step": 3, "loss": None},
        {"step": 4, "loss": "x"},
        {"loss": 1.0},
    ]
    assert plots.series(rows, "loss") == ([1], [2.0])
    assert plots.losses([{"step": 1, "loss": 5.0, "skipped": True}], []) is None


def test_each_update_is_drawn_once_and_the_tokens_are_added_up() -> None:
    rows = [{"step": step, "loss": 1.0, "tokens": 1000} for step in range(1, 41)]
    svg = plots.losses(rows, [])
    assert svg is not None
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    below = [label for label in labels if label.isdigit() and label != "0"]
    above = [label for label in labels if label.endswith(" k")]
    assert above == [f"{step} k" for step in below]
    assert above[-1] == "40 k"


def test_bars_are_as_long_as_their_bytes() -> None:
    phases = {"forward": {"weight": 100.0, "activation": 300.0}, "step": {"weight": 100.0}}
    svg = plots.memory(phases, budget=500.0, measured=None)
    assert svg is not None
    widths = []
    for role in ("weight", "activation"):
        for box in re.findall(rf'<path d="([^"]*)"[^>]*style="fill: var\(--{role}\)', svg):
            across = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", box)]
            widths.append(max(across) - min(across))
    assert len(widths) == 3
    assert widths[1] == pytest.approx(widths[0], rel=1e-3)
    assert widths[2] == pytest.approx(3 * widths[0], rel=1e-3)
    assert svg.count("stroke: var(--budget)") == 1
    assert "var(--measured)" not in svg


def test_a_kind_that_nobody_knows_has_the_colour_of_the_rest() -> None:
    assert plots.colour("weight") == "weight"
    assert plots.colour("<novel>") == "other"
