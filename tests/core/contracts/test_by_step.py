"""Numbers that depend on a run's step alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.comm import ACPSGD
from modicum.core.contracts.by_step import ByStep
from modicum.core.errors import InputError
from modicum.recipe import Recipe

COUNTS = st.integers(1, 50)


@given(COUNTS, COUNTS, st.integers(0, 40), st.integers(0, 20))
def test_it_goes_from_one_to_the_other_and_stays_there(
    first: int, last: int, updates: int, start_after: int
) -> None:
    found = ByStep.of((first, last, updates), start_after)
    assert found.most == max(first, last)
    assert all(found.at(step) is None for step in range(start_after))
    values = [found.count_at(start_after + step) for step in range(updates + 3)]
    assert values[0] == (first if updates else last)
    assert values[updates:] == [last] * 3
    assert values == sorted(values, reverse=last < first)


def test_one_number_is_that_in_every_update() -> None:
    assert [ByStep.of(3).count_at(step) for step in (0, 7)] == [3, 3]


def test_a_recipe_says_it_in_a_list() -> None:
    recipe = Recipe(comm={"method": "acp_sgd", "rank": [1, 8, 100]})
    assert recipe.method("comm") == ACPSGD(rank=(1, 8, 100))
    with pytest.raises(InputError, match="rank"):
        Recipe(comm={"method": "acp_sgd", "rank": [1, 8]})
