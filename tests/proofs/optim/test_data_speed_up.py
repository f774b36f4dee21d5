"""Data speed-ups from curves whose answer is known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.proofs.optim.data_speed_up import BUDGETS, equivalent_data, interval


@given(st.floats(0.3, 8.0), st.floats(0.05, 0.5))
def test_a_known_speed_up_is_recovered_within_and_beyond_the_curve(
    speed_up: float, power: float
) -> None:
    curve = {budget: 3.0 * budget**-power for budget in BUDGETS}
    assert equivalent_data(3.0 * speed_up**-power, curve) == pytest.approx(speed_up, rel=1e-6)


def test_with_a_floor_of_the_loss_it_is_within_three_percent_between_budgets() -> None:
    def loss(data: float) -> float:
        return 1.5 + 1.0 * data**-0.3

    curve = {budget: loss(budget) for budget in BUDGETS}
    for speed_up in (0.7, 1.0, 1.3, 3.0):
        assert equivalent_data(loss(speed_up), curve) == pytest.approx(speed_up, rel=0.03)


def test_a_curve_that_does_not_fall_says_nothing_and_divergence_is_no_data() -> None:
    assert equivalent_data(1.0, {1.0: 2.0, 2.0: 2.0}) == math.inf
    assert equivalent_data(math.nan, {1.0: 2.0, 2.0: 1.0}) == 0.0


def test_an_interval_is_students() -> None:
    low, mean, high = interval([math.exp(each) for each in (0.0, 0.1, 0.2)])
    # t of two degrees of freedom is 4.303, and the standard error 0.1 / sqrt 3.
    assert math.log(mean) == pytest.approx(0.1)
    assert math.log(high) == pytest.approx(0.1 + 4.303 * 0.1 / math.sqrt(3))
    assert math.log(low) == pytest.approx(0.1 - 4.303 * 0.1 / math.sqrt(3))
    assert interval([1.2]) == (0.0, pytest.approx(1.2), math.inf)
    assert interval([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)
