"""An exchange of gradient matrices under `transformers.Trainer`, which wraps its model in DDP.

That trainer shows a callback the model inside and not the wrapped one, so the callback is given the
trainer. Its checkpoints hold no state of callbacks, so what a resumed run owes begins at nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from modicum.core.errors import InputError
from modicum.core.ranks.ddp_hook import DDPHook
from modicum.core.ranks.matrix_exchange import MatrixExchange

if TYPE_CHECKING:
    from transformers import TrainerCallback

Bind = Callable[[nn.Module], MatrixExchange]


class HookedUpdates:
    """Hooks an exchange into a trainer's model when training begins, and commits each update.

    An update of which some sum was not finite, or before whose end `hook.discard()` was called,
    leaves what is owed as it was.

    Args:
        trainer: transformers'.
        bind: the exchange among the ranks, given the wrapped model.

    Attributes:
        hook: from the beginning of training on; None: there is one rank.
    """

    def __init__(self, trainer: Any, bind: Bind) -> None:
        self.hook: DDPHook | None = None
        self._trainer, self._bind = trainer, bind
        self._model: nn.Module | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Hook the exchange in.

        Raises:
            InputError: the trainer does not use DistributedDataParallel, or ranks differ; or
                gradients have fp16's changing scale, and the exchange owes some.
        """
        model: nn.Module = self._trainer.model_wrapped
        if self._trainer.args.world_size == 1:
            warnings.warn(
                "there is one rank, and nothing travels: gradients are used as they are",
                stacklevel=2,
            )
            return
        if model is self._model:  # it trains on, and DDP keeps its hook
            return
        exchange = self._bind(model)
        if exchange.stateful and self._trainer.accelerator.scaler is not None:
            raise InputError(
                "with fp16 gradients are multiplied by a scale that changes, and what is owed of "
                "them would not be; train with bf16",
                field="fp16",
                value=True,
            )
        self._model, self.hook = model, DDPHook(exchange, model)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The update was made, unless somebody has said that it was not."""
        if self.hook is not None:
            self.hook.settle()


def hooking_callback(trainer: Any, bind: Bind) -> TrainerCallback:
    """The callback that does so, for `trainer.add_callback`."""
    from transformers import TrainerCallback

    class Callback(HookedUpdates, TrainerCallback):
        """Hooks an exchange in."""

    return Callback(trainer, bind)
