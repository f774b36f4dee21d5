"""How often a run is saved, and what it costs in money and energy, as plans say it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.planner import plan
from modicum.planner.planning import asked_of
from modicum.planner.save_interval import EVERY, FIRST, SaveForecast
from modicum.planner.why import why
from modicum.recipe import Recipe

HOURS = {"hours_between_failures": 8.0}


@given(
    cost=st.floats(1e-3, 60.0),
    between=st.floats(600.0, 1e7),
    other=st.floats(0.1, 10.0).filter(lambda x: abs(x - 1) > 0.01),
)
def test_no_other_interval_takes_less_time(cost: float, between: float, other: float) -> None:
    best = SaveForecast.best(cost, between, least=0.0)
    assert SaveForecast(best.interval * other, cost, between).share > best.share
    # At the best, saves cost as much as lost work.
    assert best.cost / best.interval == pytest.approx(best.lost / between)


def test_a_save_is_not_begun_before_the_last_is_written() -> None:
    assert SaveForecast.best(0.01, 200.0).interval == pytest.approx(2.0)
    assert SaveForecast.best(0.01, 200.0, least=30.0).interval == 30.0
    assert "loses 15 s on average" in SaveForecast.best(0.01, 200.0, least=30.0).words()


def test_the_plan_explains_the_first_save(new: Any) -> None:
    recipe = new(checkpoint={"every": "auto", **HOURS})
    made = plan(recipe)
    assert (made.saving.steps, made.saving.seconds) == (FIRST, None)
    row = why(asked_of(recipe), made, EVERY)
    assert (row["by"], row["value"]) == ("the planner", FIRST)
    assert "8 hours between failures" in row["why"]
    found = made.chosen(EVERY, "412s", "measured")
    assert found.saving.seconds == 412.0
    assert found.replaying([found.row()]).saving.seconds == 412.0
    assert plan(new(checkpoint={"every": "9m", **HOURS})).saving.seconds == 540.0


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"checkpoint": {"every": "auto"}}, "checkpoint.every: auto needs.*hours_between_failures"),
        ({"checkpoint": {"every": "often"}}, "checkpoint.every: .*write a number of steps"),
        ({"checkpoint": {"hours_between_failures": 0.0}}, "hours_between_failures"),
        ({"cost": {"watts": "some"}}, "cost.watts"),
        ({"cost": {"price_per_hour": -1.0}}, "cost.price_per_hour"),
        ({"cost": {"currency": ""}}, "cost.currency"),
    ],
)
def test_what_cannot_be_meant_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Recipe(**sections)


def test_money_and_energy_are_forecast_where_they_are_stated(new: Any) -> None:
    known = plan(new()).row()["prediction"]
    assert not {"money", "currency", "kwh"} & known.keys()
    stated = {"price_per_hour": 3.0, "currency": "CHF", "watts": 500}
    made = plan(new(cost=stated))
    said = made.row()["prediction"]
    assert said["money"] == pytest.approx(3.0 * made.seconds / 3600)
    assert said["kwh"] == pytest.approx(0.5 * made.seconds / 3600)
    assert said["currency"] == "CHF"
    assert "kwh" not in plan(new(cost={"watts": "measured"})).row()["prediction"]
