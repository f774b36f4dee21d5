from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.comparison import OneOf, Side, TrialRange
from modicum.comparison.space import Dimension
from modicum.core.errors import InputError


@dataclass(frozen=True)
class Foreign:
    """A range of another's class, which does not say that its scale is logarithmic."""

    low: float
    high: float
    default: float
    middle: float

    def grid(self, n: int) -> Sequence[float]:
        return [self.low, self.middle, self.high]

    def widened(self, value: float) -> Foreign:
        return self


@pytest.mark.parametrize(("middle", "log"), [(0.01, True), (0.05005, False)])
def test_a_foreign_range_shows_its_scale_by_its_grid(middle: float, log: bool) -> None:
    assert Dimension.of("rate", Foreign(1e-3, 1e-1, 1e-2, middle)).log is log


SPANS = st.tuples(st.floats(1e-6, 1e3), st.floats(1.5, 1e5), st.booleans()).map(
    lambda one: TrialRange(one[0], one[0] * one[1], one[0], log=one[2])
)


@given(SPANS, st.floats(0, 1))
def test_places_and_values_are_each_other_s_inverse(span: TrialRange, place: float) -> None:
    dimension = Dimension.of("x", span)
    value = dimension.at(place)
    assert span.low <= value <= span.high
    # Four digits, of which a narrow range has fewer places.
    assert dimension.place(value) == pytest.approx(place, abs=2e-3)


@given(SPANS, st.booleans())
def test_a_widened_range_has_another_end_alone(span: TrialRange, upper: bool) -> None:
    wider = span.widened(span.high if upper else span.low)
    assert (wider.low == span.low) is upper
    assert (wider.high == span.high) is not upper
    assert wider.widened(wider.low).low < wider.low


def test_integers_and_lists_have_so_many_points() -> None:
    side = Side("a", {"rank": TrialRange(1, 4, 2), "shape": OneOf(("x", "y"), "y")}, {"z": 1})
    assert side.size == len(side.points()) == 8
    assert side.defaults() == {"rank": 2, "shape": "y"}
    assert side.defaults() in side.points()
    assert Side("none").points() == [{}]


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        ([0.01, 0.1, 0.3], {}),  # the best is not at an end
        ([0.95, 0.5], {"x": 1.0}),
        ([0.95, 0.99], {}),  # further out was worse
        ([0.02, 0.5], {"x": 0.0}),
        ([0.02, 0.01], {}),
        ([0.8, 0.5], {}),  # the range itself has more room
    ],
)
def test_the_best_is_at_an_edge_if_nothing_further_out_was_tried(
    values: list[float], edges: dict[str, float]
) -> None:
    best = {0.01: 0.3}.get(values[0], values[0])
    side = Side("a", {"x": TrialRange(0.0, 1.0, 0.5, log=False), "kind": OneOf((1, 2), 1)})
    tried: list[dict[str, Any]] = [{"x": value, "kind": 1} for value in values]
    assert side.edges({"x": best, "kind": 1}, tried) == edges


def test_what_is_no_range_is_refused() -> None:
    with pytest.raises(InputError, match="x: a range has low <= default <= high"):
        Side("a", {"x": TrialRange(0.0, 1.0, 2.0)})
    with pytest.raises(InputError, match="the default is none of the values"):
        Side("a", {"x": OneOf((1, 2), 3)})
    with pytest.raises(InputError, match=r"a\.x: this is tuned and fixed at once"):
        Side("a", {"x": OneOf((1, 2), 1)}, {"x": 1})
