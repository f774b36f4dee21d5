"""What is tuned on a side, and what the first trial has."""

from __future__ import annotations

import pytest

from modicum.comparison.sides import RecipeSide, varied
from modicum.comparison.space import Dimension
from modicum.comparison.spaces import size_of, space_of, table_of
from modicum.core.contracts.search_ranges import LogRange
from modicum.core.errors import InputError
from modicum.recipe import Recipe

RATE = "training.learning_rate"


def test_few_trials_are_not_spread_over_many_fields() -> None:
    side = RecipeSide("adamw", Recipe(), "optimizer")
    sizes = [len(space_of(side, trials)) for trials in (1, 3, 7, 8, 12)]
    assert sizes == [1, 1, 1, 2, 3]
    assert list(space_of(side, 1)) == [RATE]


def test_named_fields_are_tuned_instead() -> None:
    side = RecipeSide("adamw", Recipe(), "optimizer")
    assert list(space_of(side, 1, ("weight_decay", "learning_rate"))) == [
        "optimizer.weight_decay",
        RATE,
    ]
    with pytest.raises(InputError, match="no search table of adamw has such a field"):
        space_of(side, 12, ("weight_decy",))


def test_the_first_trial_has_what_the_recipe_states_of_its_own_method() -> None:
    recipe = Recipe(training={"learning_rate": 2e-3}, optimizer={"method": "adamw"})
    adamw, sgd = varied(recipe, "optimizer=adamw,sgd")
    assert space_of(adamw, 1)[RATE].default == 2e-3
    table, _ = table_of(sgd.recipe, "optimizer")  # type: ignore[arg-type]
    assert space_of(sgd, 1)[RATE].default == table.fields["learning_rate"].default != 2e-3


def test_a_range_is_on_its_own_scale_and_stops_at_its_bounds() -> None:
    side = RecipeSide("adamw", Recipe(), "optimizer")
    found = space_of(side, 12, ("learning_rate", "weight_decay"))
    assert Dimension.of(RATE, found[RATE]).log
    assert not Dimension.of("d", found["optimizer.weight_decay"]).log
    rate = found[RATE]
    assert isinstance(rate.range, LogRange)
    assert rate.widened(rate.range.high).high > rate.range.high  # type: ignore[operator]
    decay = found["optimizer.weight_decay"]
    assert decay.widened(0.0) is decay


def test_a_size_is_not_tuned_and_may_grow_beyond_its_range() -> None:
    recipe = Recipe(model={"path": "base"}, adapter={"method": "lora"})
    side = RecipeSide("lora", recipe, "adapter")
    assert "adapter.rank" not in space_of(side, 100)
    path, sizes = size_of(side)
    table, _ = table_of(recipe, "adapter")
    assert path == "adapter.rank"
    assert sizes[0] == 1
    assert sizes[-1] > table.fields["rank"].high  # type: ignore[union-attr]
    assert size_of(RecipeSide("adamw", Recipe(), "optimizer")) == (None, ())
    assert size_of(RecipeSide("whole", recipe)) == (None, ())
