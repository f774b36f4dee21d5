"""A run hook under `transformers.Trainer`.

That trainer clips gradients before any callback sees them, so `max_grad_norm=0` gives the usual
order; and its checkpoints hold no hook's state, so the hooks of a resumed run begin anew.
Micro-batches have equal shares of an update there. A loss between two passes is added within the
model's own forward pass (`paired_forward`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from modicum.core.contracts.paired_forward import pair_forward
from modicum.core.contracts.scaled_losses import refuse_scaled_losses
from modicum.core.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from transformers import TrainerCallback

    from modicum.core.contracts.run_hooks import RunHook


class HookCalls:
    """Calls a hook's members where the trainer comes to their places.

    Each is given arguments, state and control.

    Args:
        begin: the hook, given the model and its optimizer, when training begins.
    """

    runtime: RunHook

    def __init__(self, begin: Callable[[nn.Module, Optimizer], RunHook]) -> None:
        self._begin, self._at_end, self._evaluating = begin, ExitStack(), ExitStack()

    def on_train_begin(self, *_: Any, **known: Any) -> None:
        """Bind the hook, and enter its context with every forward pass.

        Raises:
            InputError: it adds a term to the loss, which this trainer shows to no callback; it
                changes shapes, for which a trainer must build everything anew; or it learns from
                gradients of outputs, and losses are scaled.
        """
        self.runtime = self._begin(known["model"], _bare(known["optimizer"]))
        refuse_scaled_losses(self.runtime, getattr(known["optimizer"], "scaler", None))
        if "extra_loss" in self.runtime.members:
            raise InputError(
                "this method adds a term to the loss, which transformers.Trainer shows to no "
                "callback; add it in compute_loss, or train with modicum's trainer"
            )
        if "surgery" in self.runtime.members:
            raise InputError(
                "this method changes the shapes of weights, for which transformers.Trainer builds "
                "nothing anew; train with modicum's trainer"
            )
        if "pair_loss" in self.runtime.members:
            self._at_end.callback(pair_forward(known["model"], self.runtime))
        if "forward_context" in self.runtime.members:
            self._at_end.callback(self.runtime.hook_forward(known["model"]))
        self._at_end.callback(self.runtime.close)

    def on_step_begin(self, *given: Any, **_: Any) -> None:
        """An update begins."""
        self.runtime.before_update(given[1].global_step + 1)
        self.runtime.before_forward(1 / given[0].gradient_accumulation_steps)

    def on_pre_optimizer_step(self, *given: Any, **_: Any) -> None:
        """Gradients are final, and clipped where the trainer clips."""
        self.runtime.after_backward()
        self.runtime.before_optimizer(given[1].global_step + 1)

    def on_optimizer_step(self, *given: Any, **known: Any) -> None:
        """The update was made."""
        self.runtime.after_optimizer(given[1].global_step + 1, _bare(known["optimizer"]))

    def on_step_end(self, *given: Any, **_: Any) -> None:
        """An evaluation may follow."""
        self._before_evaluation(given[2])

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """It is over."""
        self._evaluating.close()

    def on_save(self, *_: Any, **__: Any) -> None:
        """A checkpoint was written."""
        self.runtime.checkpoint()

    def on_epoch_end(self, *given: Any, **_: Any) -> None:
        """An epoch is over, and an evaluation may follow."""
        self.runtime.epoch_end(round(given[1].epoch or 0))
        self._before_evaluation(given[2])

    def _before_evaluation(self, control: Any) -> None:
        self._evaluating.close()
        if control.should_evaluate:
            self._evaluating.enter_context(self.runtime.evaluation())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the model as it was."""
        self._at_end.close()


def callback_of(begin: Callable[[nn.Module, Optimizer], RunHook]) -> TrainerCallback:
    """The callback of a hook that is bound when training begins."""
    from transformers import TrainerCallback

    class Callback(HookCalls, TrainerCallback):
        """Calls a hook."""

    return Callback(begin)


def _bare(optimizer: Any) -> Optimizer:
    """The optimizer that accelerate has wrapped, if it has."""
    found: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found
