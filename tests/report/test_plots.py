"""The picture of memory by kind."""

from __future__ import annotations

import pytest

from modicum.report import plots


def test_bars_are_as_long_as_their_bytes() -> None:
    phases = {"forward": {"activation": 300.0, "weight": 100.0}, "step": {"weight": 100.0}}
    picture = plots.bars(phases, budget=500.0, measured=None)
    assert picture is not None
    forward, step = picture["rows"]
    assert [part["kind"] for part in forward["parts"]] == ["weight", "activation"]
    assert forward["parts"][1]["width"] == pytest.approx(3 * step["parts"][0]["width"], rel=1e-3)
    assert picture["lines"] == [{"role": "budget", "place": pytest.approx(100 / 1.03, abs=1e-3)}]
    assert [tick["text"] for tick in picture["ticks"]][:2] == ["0 B", "100 B"]
    assert step["phase"] == "optimizer step"


def test_nothing_and_what_no_machine_holds_are_not_drawn() -> None:
    assert plots.bars({}, 1.0, 1.0) is None
    assert plots.bars({"step": {"weight": 0.0}}, None, None) is None
    assert plots.bars({"step": {"weight": float("inf")}}, None, None) is None


@pytest.mark.parametrize("end", [1.0, 9.99, 10.0, 3e9, 9.5e11])
def test_ticks_are_few_and_round(end: float) -> None:
    picture = plots.bars({"step": {"weight": end}}, None, None)
    assert picture is not None
    assert 3 <= len(picture["ticks"]) <= 7


def test_a_kind_that_nobody_knows_has_the_colour_of_the_others() -> None:
    assert plots.colour("weight") == "weight"
    assert plots.colour("<novel>") == "other"
