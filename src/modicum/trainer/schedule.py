"""Learning-rate schedules: functions of the step alone, so that resuming needs no state."""

from __future__ import annotations

import math

from modicum.recipe import TrainingSection


def factor(step: int, training: TrainingSection, steps: int) -> float:
    """The multiplier on the peak learning rate at `step` (0-based) of `steps`: warm-up, then decay.

    Warm-up rises linearly and reaches 1 at step `warmup_steps`; the decay ends at
    `final_fraction` on the last step.
    """
    warmup, last = training.warmup_steps, max(steps - 1, 1)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if training.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(last - warmup, 1))
    shape = 1 - progress
    if training.schedule == "cosine":
        shape = 0.5 + 0.5 * math.cos(math.pi * progress)
    return training.final_fraction + (1 - training.final_fraction) * shape
