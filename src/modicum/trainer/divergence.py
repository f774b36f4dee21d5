"""When a run whose updates are skipped is stopped."""

from __future__ import annotations

from modicum.core.errors import InputError
from modicum.planner import Plan

_OVERFLOWS = (
    "gradients travel in fp16, which is infinite above 65,504: lower comm.scale, or take "
    "comm.dtype: bf16; else"
)


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
    training, scale = plan.recipe.training, _scale(plan)
    wire = "" if scale is None else f"{_OVERFLOWS} "
    if skipped > training.skip_limit:
        rate = "training.learning_rate", training.learning_rate
        field, value = rate if scale is None else ("comm.scale", scale)
        raise TrainingDiverged(
            f"training diverged: {skipped} updates in a row had a loss or a "
            f"gradient that is not finite, up to step {step}; {wire}lower "
            "training.learning_rate or add training.warmup_steps (checkpoints before it are "
            "intact)",
            field=field,
            value=value,
        )
    if step == plan.steps and not updated:
        raise TrainingDiverged(
            f"nothing was trained: no step of this run, up to step {step}, updated "
            f"anything, as each had a loss or a gradient that is not finite; {wire}look at the "
            "data and the weights that it began with, or lower training.learning_rate"
        )


def _scale(plan: Plan) -> float | None:
    """What gradients are multiplied by before they travel in fp16; None: they do not."""
    comm = plan.recipe.comm or {}
    return comm.get("scale", 1.0) if comm.get("dtype") == "fp16" and plan.ranks > 1 else None
