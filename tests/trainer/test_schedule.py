from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.recipe import TrainingSection
from modicum.trainer.schedule import factor


def section(**fields) -> TrainingSection:
    return TrainingSection(**fields)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_edges(schedule):
    training = section(steps=11, warmup_steps=4, schedule=schedule, final_fraction=0.2)
    values = [factor(step, training, 11) for step in range(11)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert values[10] == pytest.approx(1.0 if schedule == "constant" else 0.2)
    middle = {"constant": 1.0, "linear": 0.6, "cosine": 0.6}[schedule]
    assert values[7] == pytest.approx(middle)


def test_the_cosine_is_one():
    training = section(steps=101, schedule="cosine", final_fraction=0.0)
    for step in (0, 25, 60, 100):
        expected = 0.5 + 0.5 * math.cos(math.pi * step / 100)
        assert factor(step, training, 101) == pytest.approx(expected)


@given(
    st.integers(1, 200),
    st.integers(0, 199),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1),
)
def test_it_rises_then_falls_within_its_bounds(steps, warmup, schedule, final):
    training = section(
        steps=steps, warmup_steps=min(warmup, steps - 1), schedule=schedule, final_fraction=final
    )
    values = [factor(step, training, steps) for step in range(steps)]
    up, down = values[: training.warmup_steps + 1], values[training.warmup_steps :]
    assert all(0 < low < high for low, high in pairwise(up))
    assert all(high >= low >= final - 1e-12 for high, low in pairwise(down))
    assert max(values) == up[-1] == pytest.approx(1.0)
