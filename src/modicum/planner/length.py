"""How long a run is, and how long its learning rate rises and falls, in updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from modicum.core.errors import InputError
from modicum.recipe import Recipe, TrainingSection
from modicum.tasks import AnyTask

STEPS, EPOCHS, TOKENS = "training.steps", "training.epochs", "training.tokens"
WARMUP_STEPS, WARMUP_FRACTION, WARMUP_TOKENS = (
    "training.warmup_steps", "training.warmup_fraction", "training.warmup_tokens",
)  # fmt: skip
_DECAY_FRACTION = 0.2  # of a flat schedule that says nothing of it


@dataclass(frozen=True)
class RunLength:
    """Updates of a run.

    Args:
        steps: all of them.
        warmup: how many the learning rate rises in; may be more than there are.
        decay: how many it falls in at the end; 0 of a schedule that is not flat.
    """

    steps: int
    warmup: int = 0
    decay: int = 0

    @classmethod
    def of(cls, training: TrainingSection, update: int, rows: int | None) -> RunLength:
        """What a recipe asks for, in updates.

        Args:
            update: tokens in an update, prompts and padding among them.
            rows: of the data; None where it is not known how many there are.

        Raises:
            InputError: epochs are asked for, and `rows` is None.

        >>> from modicum.recipe import TrainingSection
        >>> asked = TrainingSection(tokens="10k", warmup_fraction=0.1, schedule="flat")
        >>> RunLength.of(asked, update=96, rows=None)
        RunLength(steps=105, warmup=10, decay=21)
        """
        steps = _steps(training, update, rows)
        return cls(steps, _warmup(training, steps, update), _decay(training, steps))


@dataclass(frozen=True)
class Derived:
    """A number of updates that follows from another field than its own.

    Args:
        field: the one that it follows from.
        why: how, in words.
    """

    field: str
    why: str


def derived(training: TrainingSection, update: int, rows: int | None) -> dict[str, Derived]:
    """What of `training.steps` and `training.warmup_steps` follows from other fields, and how.

    Args:
        update, rows: as `RunLength.of`.
    """
    found = {}
    field, asked = training.length
    if field == TOKENS:
        found[STEPS] = Derived(field, _in_tokens(field, asked, update))
    elif field == EPOCHS and rows is not None:
        size = training.batch_size
        why = f"{field} {asked:g} of {rows:,} rows, {size:,} in an update, rounded up"
        found[STEPS] = Derived(field, why)
    field, asked = training.warmup
    if field == WARMUP_TOKENS:
        found[WARMUP_STEPS] = Derived(field, _in_tokens(field, asked, update))
    elif field == WARMUP_FRACTION:
        found[WARMUP_STEPS] = Derived(field, f"{field} {asked:g}")
    return found


def check_counted_in(recipe: Recipe, task: AnyTask) -> None:
    """Refuse a length in tokens where a task has none.

    Raises:
        InputError: the task counts something else.
    """
    for field, asked in (recipe.training.length, recipe.training.warmup):
        if field in (TOKENS, WARMUP_TOKENS) and task.unit != "tokens":
            instead = "steps or training.epochs"
            if field == WARMUP_TOKENS:
                instead = "warmup_steps or training.warmup_fraction"
            raise InputError(
                f"the task {task.name} counts {task.unit}, and not tokens; give training.{instead} "
                "instead",
                field=field,
                value=asked,
            )


def shown_length(
    training: TrainingSection, update: int, rows: int | None, unit: str
) -> dict[str, Any]:
    """What a plan's row says of the run's length.

    Args:
        update, rows: as `RunLength.of`.
        unit: what the task counts.
    """
    length, why = RunLength.of(training, update, rows), derived(training, update, rows)
    return {
        "steps": length.steps,
        "steps_why": why[STEPS].why if STEPS in why else None,
        "epochs": length.steps * training.batch_size / rows if rows else None,
        "tokens": length.steps * update if unit == "tokens" else None,
        "warmup_steps": length.warmup,
        "warmup_why": why[WARMUP_STEPS].why if WARMUP_STEPS in why else None,
        "decay_steps": length.decay,
    }


def steps_without_data(training: TrainingSection, update: int) -> int | None:
    """Updates as far as they are known before the data is: None of epochs.

    Args:
        update: as `RunLength.of`.
    """
    if training.tokens is not None:
        return -(-training.tokens // update)
    return training.steps


def _steps(training: TrainingSection, update: int, rows: int | None) -> int:
    if (known := steps_without_data(training, update)) is not None:
        return known
    assert training.epochs is not None
    if rows is None:
        problem = "how many rows this task has is not known; give training.steps instead"
        raise InputError(problem, field=EPOCHS, value=training.epochs)
    return max(1, math.ceil(training.epochs * rows / training.batch_size))


def _warmup(training: TrainingSection, steps: int, update: int) -> int:
    if training.warmup_tokens is not None:
        return -(-training.warmup_tokens // update)
    if training.warmup_fraction:
        return max(1, round(training.warmup_fraction * steps))
    return training.warmup_steps


def _decay(training: TrainingSection, steps: int) -> int:
    if training.schedule != "flat":
        return 0
    return max(1, round((training.decay_fraction or _DECAY_FRACTION) * steps))


def _in_tokens(field: str, asked: float, update: int) -> str:
    return f"{field} {asked:,}, {update:,} in an update, rounded up"
