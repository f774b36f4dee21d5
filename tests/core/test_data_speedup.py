"""Data speed-ups: a side over itself has none, a planted one comes out, and intervals hold it."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.core.data_speedup import crossings, data_speedups
from modicum.core.errors import InputError
from modicum.core.scaling_fit import DataLaw

LAW = DataLaw(60.0, 0.45, 1.1)
DATA = [2e5, 4e5, 8e5, 1.6e6]


def losses(
    faster: float = 1.0, *, seeds: int = 3, noise: float = 0.0, seed: int = 0
) -> dict[float, list[float]]:
    draw = random.Random(seed)
    return {
        size: [LAW.loss(faster * size) + draw.gauss(0, noise) for _ in range(seeds)]
        for size in DATA
    }


def test_the_reference_over_itself_is_one() -> None:
    for one in data_speedups(losses(), losses()):
        assert one.effective == pytest.approx(one.data, rel=1e-6)
        assert one.speedup == pytest.approx(1, rel=1e-6)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), planted=st.floats(0.6, 2.0))
def test_a_planted_speedup_is_recovered_to_two_percent(seed: int, planted: float) -> None:
    reference = losses(noise=2e-5, seed=seed)
    for one in data_speedups(reference, losses(planted, noise=2e-5, seed=seed + 1)):
        assert one.speedup == pytest.approx(planted, rel=0.02)
        assert one.interval is not None
        assert one.speedup is not None
        assert one.interval[0] < one.speedup < one.interval[1]


def test_intervals_of_three_seeds_contain_the_truth_as_often_as_they_say() -> None:
    inside = total = 0
    for seed in range(40):
        found = data_speedups(
            losses(noise=2e-3, seed=seed), losses(1.3, noise=2e-3, seed=1000 + seed)
        )
        for one in found:
            if one.interval is not None:
                total += 1
                inside += one.interval[0] <= 1.3 <= one.interval[1]
    assert total > 140
    assert inside / total > 0.88


def test_what_lies_outside_of_the_measured_data_says_so() -> None:
    found = data_speedups(losses(), losses(1.3))
    assert [one.extrapolated for one in found] == [False, False, False, True]


def test_a_seed_that_diverged_or_a_loss_below_the_floor_has_no_speedup() -> None:
    method = losses()
    method[DATA[0]][1] = math.inf
    method[DATA[1]] = [0.5] * 3
    found = data_speedups(losses(), method)
    assert [one.speedup is None for one in found] == [True, True, False, False]
    assert "no finite loss" in found[0].problem
    assert "floor" in found[1].problem
    json.dumps([one.to_json() for one in found], allow_nan=False)


def test_one_seed_has_no_interval() -> None:
    found = data_speedups(losses(seeds=1), losses(1.3, seeds=1))
    assert all(one.interval is None for one in found)


def test_other_numbers_of_seeds_are_refused() -> None:
    with pytest.raises(InputError, match="same seeds"):
        data_speedups(losses(seeds=2), losses(seeds=3))
    with pytest.raises(InputError, match="four sizes"):
        data_speedups({size: [1.0 / size] for size in DATA[:3]}, {DATA[0]: [1.0]})


def test_curves_cross_where_their_difference_changes_sign() -> None:
    one = [(0.25, 4.0), (0.5, 3.0), (0.75, 2.0), (1.0, 1.0)]
    assert crossings(one, one) == []
    assert crossings(one, [(share, loss + 0.1) for share, loss in one]) == []
    other = [(0.25, 4.5), (0.5, 3.5), (0.75, 2.0), (1.0, 0.5)]
    assert crossings(one, other) == [0.75]
    twice = [(0.25, 4.5), (0.5, 2.5), (0.75, 2.5), (1.0, 1.5)]
    assert crossings(one, twice) == [0.375, 0.625]
    with pytest.raises(InputError, match="same shares"):
        crossings(one, one[1:])
