"""When a run whose updates are skipped is stopped."""

from __future__ import annotations

from modicum.core.errors import InputError
from modicum.planner import Plan


class TrainingDiverged(InputError):
    """Updates had losses or gradients that are not finite, and the run was stopped for it."""


def refuse_divergence(plan: Plan, step: int, skipped: int, *, updated: bool) -> None:
    """Stop a run that skips too many updates, or that has skipped all.

    Args:
        step: the update that was just skipped.
        skipped: how many were in a row, this one among them.
        updated: whether any update of the run was not.

    Raises:
        TrainingDiverged: so it does.
    """
    training = plan.recipe.training
    if skipped > training.skip_limit:
        raise TrainingDiverged(
            f"training diverged: {skipped} updates in a row had a loss or a "
            f"gradient that is not finite, up to step {step}; lower "
            "training.learning_rate or add training.warmup_steps (checkpoints before it are "
            "intact)",
            field="training.learning_rate",
            value=training.learning_rate,
        )
    if step == plan.steps and not updated:
        raise TrainingDiverged(
            f"nothing was trained: no step of this run, up to step {step}, updated "
            "anything, as each had a loss or a gradient that is not finite; look at the data "
            "and the weights that it began with, or lower training.learning_rate"
        )
