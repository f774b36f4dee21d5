"""Fits of L(D) and h(N, R): exact laws come back, and what no fit can say is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.core.scaling_fit import (
    DataLaw,
    RegimeLaw,
    fit_data_law,
    fit_regime_law,
    held_out_fit,
)

RATIOS = (0.5, 1.0, 2.0, 4.0)


@settings(max_examples=30)
@given(
    alpha=st.floats(5, 500),
    exponent=st.floats(0.1, 0.9),
    floor=st.floats(0, 2),
    unit=st.floats(1e4, 1e9),
)
def test_an_exact_law_comes_back(alpha: float, exponent: float, floor: float, unit: float) -> None:
    law = DataLaw(alpha, exponent, floor)
    data = [unit * ratio for ratio in RATIOS]
    found = fit_data_law(data, [law.loss(size) for size in data])
    for size in data:
        assert found.loss(size) == pytest.approx(law.loss(size), rel=1e-6)
        assert found.data(law.loss(size)) == pytest.approx(size, rel=1e-3)


def test_at_the_floor_no_data_is_enough() -> None:
    law = DataLaw(10.0, 0.5, 1.0)
    assert law.data(1.0) == law.data(0.5) == math.inf


@pytest.mark.parametrize(
    ("data", "losses", "sentence"),
    [
        ([1e5, 2e5, 4e5], [3, 2, 1.5], "four"),
        ([1e5, 1e5, 2e5, 4e5], [3, 3.1, 2, 1.5], "four"),
        ([1e5, 2e5, 4e5, 8e5], [3, 2, math.inf, 1], "finite"),
        ([0, 2e5, 4e5, 8e5], [3, 2, 1.5, 1], "positive"),
        ([1e5, 2e5, 4e5, 8e5], [3, 2, 1.5, 3], "no lower loss"),
    ],
)
def test_what_no_curve_goes_through_is_refused(
    data: list[float], losses: list[float], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        fit_data_law(data, losses)


@settings(max_examples=20)
@given(b=st.floats(-1, 1), c=st.floats(-1, 1), offset=st.floats(0, 0.01))
def test_the_last_regime_is_predicted_by_the_others(b: float, c: float, offset: float) -> None:
    law = RegimeLaw(0.02 * 2e4**-b, b, c, offset)
    points = [(n, r, law.value(n, r)) for n in (1e4, 2e4, 4e4) for r in RATIOS]
    fit = held_out_fit(points)
    assert fit.found == points[-1][2]
    assert fit.predicted == pytest.approx(fit.found, rel=1e-3)
    # What is held out does not decide the law.
    moved = held_out_fit([*points[:-1], (*points[-1][:2], 7.0)])
    assert (moved.predicted, moved.found) == (fit.predicted, 7.0)


def test_a_value_that_is_the_same_everywhere_is_predicted_everywhere() -> None:
    law = fit_regime_law([(n, r, 0.004) for n in (1e4, 2e4) for r in RATIOS])
    assert law.value(1e9, 16) == 0.004


@pytest.mark.parametrize("count", [1, 4])
def test_few_regimes_have_no_law(count: int) -> None:
    with pytest.raises(InputError, match="five regimes"):
        fit_regime_law([(1e4 * (1 + place), 1.0, 0.1 * place) for place in range(count)])
    with pytest.raises(InputError, match="five regimes"):
        held_out_fit([(1e4 * (1 + place), 1.0, 0.1 * place) for place in range(count + 1)])
