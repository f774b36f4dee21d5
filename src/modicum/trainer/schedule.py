"""Learning-rate schedules: functions of the step alone, so that resuming needs no state."""

from __future__ import annotations

import math

from modicum.planner.length import RunLength
from modicum.recipe import TrainingSection


def factor(step: int, training: TrainingSection, length: RunLength) -> float:
    """The multiplier on the peak learning rate at `step` (0-based): warm-up, then decay.

    Warm-up rises linearly and reaches 1 at step `length.warmup`. Then `linear` and `cosine` fall,
    and `flat` stays at 1 up to the last `length.decay` steps, which are on a line below it. The
    last step is at `final_fraction`, and at more where that is 0: no update has a rate of 0, as in
    other trainers (transformers, optax), whose schedules end one step after the last.

    >>> training = TrainingSection(schedule="flat", final_fraction=0)
    >>> [factor(step, training, RunLength(8, warmup=1, decay=3)) for step in range(8)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    steps, warmup = length.steps, length.warmup
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if training.schedule == "constant":
        return 1.0
    begin, end = warmup, steps - 1 if training.final_fraction else steps
    if training.schedule == "flat":
        begin = max(warmup, steps - 1 - length.decay)
    progress = min(1.0, max(0.0, (step - begin) / max(end - begin, 1)))
    shape = 1 - progress
    if training.schedule == "cosine":
        shape = 0.5 + 0.5 * math.cos(math.pi * progress)
    return training.final_fraction + (1 - training.final_fraction) * shape
