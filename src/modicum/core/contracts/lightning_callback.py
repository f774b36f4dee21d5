"""A run hook under Lightning's `Trainer`, of `lightning` or of `pytorch_lightning`.

Lightning clips gradients after its callbacks have seen them, which is the usual order. Its
checkpoints hold no hook's state, so the hooks of a resumed run begin anew.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from modicum.core.contracts.scaled_losses import refuse_scaled_losses
from modicum.core.errors import InputError
from modicum.core.extras import library

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from modicum.core.contracts.run_hooks import PassKind, RunHook

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# What a method may do that Lightning shows to no callback, and what to do instead.
_PASSES: dict[str, PassKind] = {"training_step": "train", "validation_step": "evaluate"}
_REFUSED = {
    "extra_loss": "adds a term to the loss; add it in training_step",
    "pair_loss": "adds a term to the loss; add it in training_step",
    "surgery": "changes the shapes of weights, and nothing is built anew",
}


class LightningCalls:
    """Calls a hook's members where the trainer comes to their places.

    Args:
        begin: the hook, given the module and its optimizer, when training begins.
    """

    runtime: RunHook

    def __init__(self, begin: Callable[[nn.Module, Optimizer], RunHook]) -> None:
        self._begin, self._done = begin, 0
        self._at_end, self._evaluating = ExitStack(), ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Bind the hook.

        Raises:
            InputError: there are several optimizers; the method does what Lightning shows to no
                callback; or it learns from gradients of outputs, and losses are scaled.
        """
        if len(trainer.optimizers) != 1:
            raise InputError(
                "a method of modicum works with one optimizer",
                field="configure_optimizers",
                value=len(trainer.optimizers),
                allowed="1",
            )
        self.runtime = self._begin(pl_module, _bare(trainer.optimizers[0]))
        refuse_scaled_losses(self.runtime, getattr(trainer, "scaler", None))
        for member, why in _REFUSED.items():
            if member in self.runtime.members:
                self.runtime.close()
                raise InputError(
                    f"this method {why}, or train with modicum's trainer: Lightning shows that to "
                    "no callback"
                )
        if "forward_context" in self.runtime.members:
            self._enter_with_passes(pl_module)
        self._done = trainer.global_step

    def _enter_with_passes(self, module: Any) -> None:
        """Enter the hook's context with each step, in which the module calls its parts itself."""
        for name, kind in _PASSES.items():
            step = getattr(module, name)

            def within(*given: Any, _step: Any = step, _kind: PassKind = kind, **more: Any) -> Any:
                with self.runtime.forward_context(_kind):
                    return _step(*given, **more)

            setattr(module, name, within)
            self._at_end.callback(delattr, module, name)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """An update begins with the first of its micro-batches."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.runtime.before_update(trainer.global_step + 1)
        self.runtime.before_forward(1 / trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients are final, and not clipped yet."""
        self.runtime.after_backward()
        self.runtime.before_optimizer(trainer.global_step + 1)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """The update was made, if this was its last micro-batch."""
        if trainer.global_step > self._done:
            self._done = trainer.global_step
            self.runtime.after_optimizer(self._done, _bare(trainer.optimizers[0]))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """An evaluation begins; the one before training has no hook yet."""
        if not trainer.sanity_checking and hasattr(self, "runtime"):
            self._evaluating.enter_context(self.runtime.evaluation())

    def on_validation_end(self, *_: Any) -> None:
        """It is over."""
        self._evaluating.close()

    def on_save_checkpoint(self, *_: Any) -> None:
        """A checkpoint is written."""
        self.runtime.checkpoint()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """An epoch is over."""
        self.runtime.epoch_end(trainer.current_epoch + 1)

    def on_train_end(self, *_: Any) -> None:
        """Leave the model as it was."""
        self._evaluating.close()
        self._at_end.close()
        self.runtime.close()

    def on_exception(self, *_: Any) -> None:
        """The same where training fails."""
        self._evaluating.close()
        self._at_end.close()
        if hasattr(self, "runtime"):
            self.runtime.close()


def lightning_callback_of(begin: Callable[[nn.Module, Optimizer], RunHook]) -> Any:
    """The callback of a hook that is bound when training begins.

    It is of the package that the program has imported, since Lightning has two names.

    Raises:
        InputError: neither is installed.
    """
    name = next((name for name in _PACKAGES if sys.modules.get(name) is not None), None)
    if name is None:
        library("pytorch_lightning", "lightning", "a callback of Lightning")
        name = "pytorch_lightning"
    base: Any = importlib.import_module(name).Callback
    made: Any = type("Callback", (LightningCalls, base), {"__doc__": "Calls a hook."})
    return made(begin)


def _bare(optimizer: Any) -> Optimizer:
    """The optimizer that a strategy has wrapped, if it has."""
    found: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return found
