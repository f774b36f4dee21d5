"""Trainers that multiply losses by a scale, as fp16 needs, and what hooks then see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modicum.core.errors import InputError

if TYPE_CHECKING:
    from modicum.core.contracts.run_hooks import RunHook


def refuse_scaled_losses(hook: RunHook, scaler: object) -> None:
    """Refuse, and close, a hook that would learn from gradients of outputs that are scaled.

    It sees gradients of outputs in the backward pass, before anybody divides them by the scale.
    Those of weights are divided before a hook is called where the trainer clips. Where it does not,
    older versions of transformers leave that to the step, and Lightning does for fused optimizers.

    Args:
        scaler: the trainer's; None: it has none.

    Raises:
        InputError: there is one, and the hook learns from gradients of outputs.
    """
    if scaler is not None and hook.reads_output_gradients:
        hook.close()
        raise InputError(
            "with fp16 losses are multiplied by a scale that changes, and so are the gradients of "
            "outputs that this method learns from; train with bf16, or with modicum's trainer"
        )
