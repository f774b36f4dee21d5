"""Ranges of what may be tuned: grids, draws, ends."""

from __future__ import annotations

from itertools import pairwise
from math import inf, log, nan
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from modicum.core.contracts.search import IntegerRange, LinearRange, LogRange, SearchChoice
from modicum.core.contracts.search_ranges import FieldBounds, split_steps
from modicum.core.errors import InputError

UNIT = st.floats(0, 1, exclude_max=True)


@st.composite
def numbers(draw: st.DrawFn) -> LogRange | LinearRange:
    kind = draw(st.sampled_from([LogRange, LinearRange]))
    least = 1e-8 if kind is LogRange else -1e6
    low, high = sorted(draw(st.tuples(*[st.floats(least, 1e6)] * 2)))
    assume(low < high)
    return kind(low, high, draw(st.floats(low, high)))


@st.composite
def integers(draw: st.DrawFn) -> IntegerRange:
    logarithmic, step = draw(st.booleans()), draw(st.integers(1, 7))
    ends = st.integers(1 if logarithmic else -300, 300)
    low, high = sorted(draw(st.tuples(ends, ends)))
    assume(low < high)
    default = draw(st.integers(low, high))
    return IntegerRange(*(step * each for each in (low, high, default)), logarithmic, step)


@given(numbers(), st.integers(1, 30))
@example(LogRange(1e6, 1000000.0000000002, 1000000.0000000001), 9)
@example(LogRange(1.0, 1.0000000000000004, 1.0000000000000002), 9)
def test_a_grid_of_numbers_ascends_and_has_the_default_and_both_ends(
    known: LogRange | LinearRange, count: int
) -> None:
    grid = known.grid(count)
    assert known.default in grid
    assert all(one <= other for one, other in pairwise(grid))
    assert known.low <= grid[0] <= grid[-1] <= known.high
    assert len(grid) == count
    if count > 2:
        assert (grid[0], grid[-1]) == (known.low, known.high)


@given(integers(), st.integers(1, 60))
def test_a_grid_of_integers_has_as_many_as_there_are(known: IntegerRange, count: int) -> None:
    grid = known.grid(count)
    there = (known.high - known.low) // known.step + 1
    assert len(grid) == len(set(grid)) == min(count, there)
    assert list(grid) == sorted(grid)
    assert known.default in grid
    assert all(type(value) is int and value % known.step == 0 for value in grid)
    assert known.low <= grid[0] <= grid[-1] <= known.high


def test_steps_of_a_grid_are_those_of_its_scale() -> None:
    assert LogRange(1e-4, 1e-1, 1e-3).grid(4) == (1e-4, 1e-3, 1e-2, 1e-1)
    assert LinearRange(0.0, 0.2, 0.05).grid(5) == (0.0, 0.05, 0.1, 0.15, 0.2)
    assert IntegerRange(1, 64, 8, log=True).grid(7) == (1, 2, 4, 8, 16, 32, 64)
    assert IntegerRange(2, 14, 6, step=2).grid(4) == (2, 6, 10, 14)
    assert IntegerRange(1, 8, 4, log=True).grid(99) == tuple(range(1, 9))
    assert LogRange(1e-4, 1e-1, 2e-4).grid(2) == (2e-4, 1e-1)  # the farther end
    assert LogRange(1e-4, 1e-1, 2e-4).grid(3) == (1e-4, 2e-4, 1e-1)
    assert LinearRange(0.0, 1.0, 0.0).grid(1) == (0.0,)
    steps = [log(b / a) for a, b in pairwise(LogRange(1e-5, 1e-1, 1e-3).grid(12))]
    assert max(steps) < 1.3 * min(steps)


@given(st.integers(1, 50), st.floats(0, 1))
def test_steps_are_as_many_and_each_side_has_some(count: int, share: float) -> None:
    below, above = split_steps(count, share)
    assert below + above == count - 1
    if count > 2 and 0 < share < 1:
        assert min(below, above) >= 1


@given(st.one_of(numbers(), integers()), UNIT, UNIT)
def test_draws_ascend_with_the_number_and_stay_inside(known: Any, one: float, two: float) -> None:
    low, high = (known.at(each) for each in sorted((one, two)))
    assert known.low <= low <= high <= known.high
    assert known.clip(low) == low
    assert known.at(0.0) == pytest.approx(known.low)


def test_integers_are_drawn_alike() -> None:
    drawn = [IntegerRange(1, 4, 2).at(k / 400) for k in range(400)]
    assert [drawn.count(value) for value in (1, 2, 3, 4)] == pytest.approx([100] * 4, abs=1)
    even = {IntegerRange(2, 8, 4, log=True, step=2).at(k / 400) for k in range(400)}
    assert even == {2, 4, 6, 8}


@pytest.mark.parametrize("number", [-0.1, 1.0, nan])
@pytest.mark.parametrize(
    "known", [LogRange(1, 10, 3), IntegerRange(1, 3, 2), SearchChoice((1, 2), 1)]
)
def test_what_is_not_drawn_from_the_unit_interval_is_refused(known: Any, number: float) -> None:
    with pytest.raises(InputError, match="at least 0 and below 1"):
        known.at(number)


@given(numbers(), st.floats(-1e7, 1e7))
def test_clipping_gives_the_nearest(known: LogRange | LinearRange, value: float) -> None:
    clipped = known.clip(value)
    assert known.low <= clipped <= known.high
    assert clipped == value or clipped in (known.low, known.high)
    assert (known.edge(value) is None) == (known.low < value < known.high)


@given(st.one_of(numbers(), integers()), st.sampled_from(["low", "high"]))
def test_a_wider_range_goes_farther_at_one_end_alone(known: Any, end: str) -> None:
    assume(not (isinstance(known, IntegerRange) and known.log and known.low == known.step))
    wider = known.widened(getattr(known, end))
    other = {"low": "high", "high": "low"}[end]
    assert getattr(wider, other) == getattr(known, other)
    assert wider.default == known.default
    assert (wider.low < known.low) if end == "low" else (wider.high > known.high)


def test_how_far_a_wider_range_goes() -> None:
    rate = LogRange(1e-4, 1e-1, 1e-3)
    assert rate.widened(1e-2) is rate
    assert rate.widened(1e-4, factor=10).low == pytest.approx(1e-5)
    assert rate.widened(3.0) == LogRange(1e-4, 0.4, 1e-3)  # beyond an end
    assert LinearRange(0.0, 0.1, 0.0).widened(0.1).high == pytest.approx(0.2)
    assert LinearRange(0.5, 1.0, 0.5).widened(0.5).low == pytest.approx(0.0)
    assert IntegerRange(4, 64, 8, log=True).widened(64).high == 256
    assert IntegerRange(2, 6, 4, step=2).widened(6).high == 10


def test_bounds_of_the_field_hold_an_end() -> None:
    share = LinearRange(0.1, 0.6, 0.3)
    closed, open_ = FieldBounds(0, 1), FieldBounds(0, 1, True, True)
    assert share.widened(0.6, closed).high == 1.0
    assert share.widened(0.6, open_).high == pytest.approx(0.8)
    assert share.widened(0.1, open_).low == pytest.approx(0.05)
    ranks = IntegerRange(2, 30, 4, log=True)
    assert ranks.widened(30, FieldBounds(high=33, high_open=True)).high == 32
    assert ranks.widened(2, FieldBounds(low=0, low_open=True)).low == 1
    evens = IntegerRange(2, 30, 4, step=2)
    assert evens.widened(30, FieldBounds(high=33)).high == 32
    assert evens.widened(2, FieldBounds(low=-3, low_open=True)).low == -2


@pytest.mark.parametrize(
    ("known", "value", "within"),
    [
        (LinearRange(0.0, 0.9, 0.3), 0.0, FieldBounds(low=0)),
        (LinearRange(0.5, 1.0, 0.5), 1.0, FieldBounds(high=1)),
        (IntegerRange(1, 8, 4, log=True), 1, None),
        (IntegerRange(1, 8, 4), 1, FieldBounds(low=0, low_open=True)),
        (SearchChoice((2, 4, 8), 2), 8, None),
        (SearchChoice((2, 4, 8), 2), 1, None),
    ],
)
def test_what_cannot_be_widened_says_so(known: Any, value: float, within: Any) -> None:
    with pytest.raises(InputError, match="so it cannot be widened"):
        known.widened(value, within)


def test_a_factor_that_does_not_widen_is_refused() -> None:
    with pytest.raises(InputError, match="factor: must be above 1"):
        LogRange(1.0, 2.0, 1.0).widened(1.0, factor=1.0)


def test_choices() -> None:
    words = SearchChoice(("rand", "snip", "struct"), "snip")
    assert words.grid(1) == ("snip",)
    assert words.grid(2) == ("snip", "struct") or words.grid(2) == ("rand", "snip")
    assert words.grid(9) == words.values
    assert [words.at(k / 6) for k in range(6)] == ["rand"] * 2 + ["snip"] * 2 + ["struct"] * 2
    assert words.edge("rand") is None
    assert words.widened("rand") is words
    assert words.clip("struct") == "struct"
    with pytest.raises(InputError, match=r"is none of the values.*allowed: 'rand', 'snip'"):
        words.clip("magnitude")
    assert SearchChoice((2, 4, 8), 2).clip(7) == 8
    assert SearchChoice((False, True), False).edge(True) is None
    with pytest.raises(InputError, match="none of the values"):
        SearchChoice((1, 2), 1).clip(True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogRange(2.0, 1.0, 1.0), r"low: must be below `high` \(found: 2.0\)"),
        (lambda: LogRange(1.0, 1.0, 1.0), "must be below"),
        (lambda: LogRange(0.0, 1.0, 0.5), "low: a logarithmic scale has numbers above zero"),
        (lambda: LogRange(1.0, 2.0, 3.0), r"default: lies outside .*3.0.*allowed: 1.0 to 2.0"),
        (lambda: LinearRange(0.0, inf, 1.0), "high: must be a finite number"),
        (lambda: LinearRange(-1e308, 1e308, 1.0), "high: too far above `low`"),
        (lambda: LinearRange(nan, 1.0, 1.0), "low: must be a finite number"),
        (lambda: LinearRange("0", 1.0, 1.0), "low: expected a number"),  # type: ignore[arg-type]
        (lambda: LinearRange(False, 1.0, 1.0), "low: expected a number"),
        (lambda: IntegerRange(1, 8.0, 2), "high: expected an integer"),  # type: ignore[arg-type]
        (lambda: IntegerRange(0, 8, 2, log=True), "low: a logarithmic scale"),
        (lambda: IntegerRange(2, 8, 3, step=2), "default: must be a multiple of 2"),
        (lambda: IntegerRange(2, 8, 2, step=0), "step: expected a positive integer"),
        (lambda: IntegerRange(2, 8, 2, log=1), "log: expected true"),  # type: ignore[arg-type]
        (lambda: SearchChoice((1,), 1), "values: expected a tuple of two values or more"),
        (lambda: SearchChoice([1, 2], 1), "values: expected a tuple"),  # type: ignore[arg-type]
        (lambda: SearchChoice((1, 2, 1), 1), "values: is there twice"),
        (lambda: SearchChoice((2, 1), 1), "values: numbers must ascend"),
        (lambda: SearchChoice((1, 2), 3), "default: is none of the values"),
        (lambda: SearchChoice((1, 2), 1.0), "default: is none of the values"),
        (lambda: SearchChoice(({}, 1), 1), "values: is no plain value"),
        (lambda: SearchChoice((1.0, nan), 1.0), "values: is no plain value"),
        (lambda: LogRange(1.0, 2.0, 1.0).grid(0), "expected a positive number of values"),
    ],
)
def test_what_is_no_range_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
