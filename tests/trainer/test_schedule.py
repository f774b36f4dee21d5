from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.planner.length import RunLength
from modicum.recipe import TrainingSection
from modicum.trainer.schedule import factor

SCHEDULES = ("constant", "linear", "cosine", "flat")


def values_of(steps: int, **fields: Any) -> list[float]:
    """The factors of all steps."""
    training = TrainingSection(steps=steps, **fields)
    length = RunLength.of(training, update=1, rows=None)
    return [factor(step, training, length) for step in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_edges(schedule: str) -> None:
    values = values_of(11, warmup_steps=4, schedule=schedule, final_fraction=0.2)
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert values[10] == pytest.approx(1.0 if schedule == "constant" else 0.2)
    middle = {"constant": 1.0, "linear": 0.6, "cosine": 0.6, "flat": 1.0}[schedule]
    assert values[7] == pytest.approx(middle)


@pytest.mark.parametrize("final", [0.0, 0.25])
def test_the_cosine_is_one(final: float) -> None:
    values = values_of(101, schedule="cosine", final_fraction=final)
    last = 100 if final else 101
    for step in (0, 25, 60, 100):
        shape = 0.5 + 0.5 * math.cos(math.pi * step / last)
        assert values[step] == pytest.approx(final + (1 - final) * shape)


def test_the_flat_schedule_falls_as_the_warm_up_rises() -> None:
    values = values_of(40, schedule="flat", warmup_steps=10, decay_fraction=0.25, final_fraction=0)
    assert values == pytest.approx(values[::-1])
    assert values[10:30] == [1.0] * 20
    assert values[-1] == pytest.approx(1 / 11)


def test_a_flat_schedule_that_falls_all_the_way_is_linear() -> None:
    fields = {"warmup_steps": 3, "final_fraction": 0.1}
    flat = values_of(30, schedule="flat", decay_fraction=1.0, **fields)
    assert flat == values_of(30, schedule="linear", **fields)


@given(
    steps=st.integers(1, 200),
    warmup=st.integers(0, 199),
    schedule=st.sampled_from(SCHEDULES),
    final=st.one_of(st.just(0.0), st.floats(1e-6, 1)),
    decay=st.floats(1e-3, 1),
)
def test_it_rises_then_falls_on_a_line_or_a_cosine_to_its_end(
    steps: int, warmup: int, schedule: str, final: float, decay: float
) -> None:
    warmup = min(warmup, steps - 1)
    fields: dict[str, Any] = {"decay_fraction": decay} if schedule == "flat" else {}
    values = values_of(
        steps, warmup_steps=warmup, schedule=schedule, final_fraction=final, **fields
    )
    up, down = values[: warmup + 1], values[warmup:]
    assert all(0 < low < high for low, high in pairwise(up))
    assert all(high >= low >= final - 1e-12 for high, low in pairwise(down))
    assert max(values) == up[-1] == pytest.approx(1.0)
    assert min(values) > 0
    # No jumps: a step changes the rate by no more than the line, or the cosine's steepest part.
    room = len(down) - 1
    falling = min(room, max(1, round(decay * steps))) if schedule == "flat" else room
    steepest = math.pi / 2 if schedule == "cosine" else 1.0
    most = steepest * (1 - final) / max(1, falling) + 1e-12
    assert all(high - low <= most for high, low in pairwise(down))
    if schedule != "constant" and room:
        # 0 would come one step later.
        assert down[-1] == pytest.approx(final, abs=0 if final else most + 1e-12)


@given(
    steps=st.integers(1, 300),
    more=st.integers(0, 300),
    schedule=st.sampled_from(SCHEDULES),
    step=st.integers(0, 299),
)
def test_a_longer_run_is_never_at_a_lower_rate(
    steps: int, more: int, schedule: str, step: int
) -> None:
    step = min(step, steps - 1)
    short, long = (
        values_of(n, schedule=schedule, warmup_steps=5)[step] for n in (steps, steps + more)
    )
    assert long >= short - 1e-12
