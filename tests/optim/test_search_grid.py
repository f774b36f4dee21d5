"""Grids: what is refused, how they continue beyond an end, and ranges that give one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.optim.search_grid import SearchGrid


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (((), 1), "one value at least"),
        (((1, 2), 3), "none of the grid's values"),
        (((1, 1), 1), "there twice"),
        (((2, 1), 1, "linear"), "must ascend"),
        (((0.0, 1.0), 0.0, "log"), "above zero"),
        ((("a", "b"), "a", "log"), "finite numbers"),
        (((1.0, math.inf), 1.0, "log"), "finite numbers"),
        (((True, False), True, "linear"), "finite numbers"),
        (((0.0, 1.0), 0.0, "linear", 0.5), "lies outside"),
    ],
)
def test_what_is_no_grid_is_refused(fields: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SearchGrid(*fields)


@pytest.mark.parametrize(
    ("grid", "end", "values"),
    [
        (SearchGrid((1e-3, 3e-3, 9e-3), 3e-3, "log"), 9e-3, (1e-3, 3e-3, 9e-3, 0.027)),
        (SearchGrid((1e-3, 3e-3), 3e-3, "log"), 1e-3, (0.0003333, 1e-3, 3e-3)),
        (SearchGrid((0.0, 0.1), 0.0, "linear"), 0.1, (0.0, 0.1, 0.2)),
        (SearchGrid((8, 16), 8, "log"), 16, (8, 16, 32)),
        (SearchGrid((0.5, 0.8), 0.5, "linear", most=0.9), 0.8, (0.5, 0.8, 0.9)),
    ],
)
def test_a_grid_continues_on_its_scale(grid: SearchGrid, end: Any, values: Any) -> None:
    wider = grid.extended(end)
    assert wider is not None
    assert wider.values == values
    assert wider.default == grid.default


@pytest.mark.parametrize(
    ("grid", "value"),
    [
        (SearchGrid((1, 2, 3), 1, "linear"), 2),
        (SearchGrid((0.0, 0.1), 0.0, "linear", least=0.0), 0.0),
        (SearchGrid((1, 2), 1), 2),
        (SearchGrid((1.0,), 1.0, "log"), 1.0),
        (SearchGrid((1, 2), 1, "log"), 3),
    ],
)
def test_inside_or_where_nothing_is_beyond_it_stays(grid: SearchGrid, value: Any) -> None:
    assert grid.extended(value) is None


@given(low=st.floats(1e-6, 1e3), ratio=st.floats(1.1, 20), count=st.integers(1, 6))
def test_extended_again_and_again_numbers_ascend(low: float, ratio: float, count: int) -> None:
    grid = SearchGrid((low, low * ratio), low, "log")
    for _ in range(count):
        wider = grid.extended(grid.values[-1])
        assert wider is not None
        grid = wider
    assert len(grid.values) == count + 2
    assert grid.values[-1] == pytest.approx(low * ratio ** (count + 1), rel=1e-2)


class Range:
    """As ranges of other packages are: a default, and a grid of so many values."""

    def __init__(self, default: float, *values: float) -> None:
        self.default, self._values = default, values

    def grid(self, count: int) -> tuple[float, ...]:
        return self._values[:count]


class Choice:
    default, values = "b", ("a", "b")

    def grid(self, count: int) -> tuple[str, ...]:
        return self.values


def test_a_range_gives_a_grid_on_its_own_scale() -> None:
    assert SearchGrid.of(Range(1e-3, 1e-4, 1e-3, 1e-2)).scale == "log"
    linear = SearchGrid.of(Range(0.1, 0.1, 0.2, 0.3), least=0.0)
    assert (linear.scale, linear.least) == ("linear", 0.0)
    assert SearchGrid.of(Range(0.0, 0.0, 0.2)).scale == "linear"
    assert SearchGrid.of(Choice()) == SearchGrid(("a", "b"), "b")
    assert SearchGrid.of(Range(2e-3, 1e-3, 1e-2)).values == (1e-3, 2e-3, 1e-2)
