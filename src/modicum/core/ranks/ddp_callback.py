"""An exchange of gradient matrices under `transformers.Trainer`, which wraps its model in DDP.

That trainer shows a callback the model inside and not the wrapped one, so the callback is given the
trainer. What ranks owe is in that trainer's checkpoints, in files of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from modicum.core.errors import InputError
from modicum.core.ranks.ddp_hook import DDPHook
from modicum.core.ranks.exchange_file import load_exchange, save_exchange, saved_exchanges
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.one_rank import NOTHING_TRAVELS, warn_of_one_rank

if TYPE_CHECKING:
    from transformers import TrainerCallback

Bind = Callable[[nn.Module], MatrixExchange]


class HookedUpdates:
    """Hooks an exchange into a trainer's model when training begins, and commits each update.

    What ranks owe is saved with the trainer's checkpoints, and taken up from where they are: the
    folder of its arguments' `resume_from_checkpoint`, or of its own checkpoint of that step. Where
    there is nothing for these weights a warning says that it begins at nothing.

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

    def on_train_begin(
        self, args: Any = None, state: Any = None, control: Any = None, **_: Any
    ) -> None:
        """Hook the exchange in; in a run that resumes, take up what ranks owe.

        Raises:
            InputError: the trainer does not use DistributedDataParallel, or ranks differ; or
                gradients have fp16's changing scale, and the exchange owes some; or what ranks owe
                is in a damaged file.
        """
        self._hook_in()
        if state is not None and state.global_step > 0:
            self._take_up(int(state.global_step))

    def _hook_in(self) -> None:
        model: nn.Module = self._trainer.model_wrapped
        if self._trainer.args.world_size == 1:
            warn_of_one_rank(NOTHING_TRAVELS)
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

    def _take_up(self, step: int) -> None:
        named = [self._trainer.args.resume_from_checkpoint, self._checkpoint(step)]
        folders = [Path(folder) for folder in named if isinstance(folder, str | Path)]
        if self.hook is None:
            if any(saved_exchanges(folder) for folder in folders):
                warnings.warn(
                    "the checkpoint is of several ranks, and what they owe is not taken up by one",
                    stacklevel=2,
                )
            return
        exchange = self.hook.exchange
        if not exchange.stateful:
            return
        if not any(load_exchange(exchange, self._inner, folder) for folder in folders):
            warnings.warn(
                "no checkpoint holds what ranks owe next to these weights, so it begins at nothing "
                f"(looked in {', '.join(map(str, folders))})",
                stacklevel=2,
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put what ranks owe into the checkpoint that the trainer has made."""
        folder = self._checkpoint(int(state.global_step))
        if self.hook is None or self._trainer.args.save_only_model or not folder.is_dir():
            return
        if self.hook.exchange.stateful:
            save_exchange(self.hook.exchange, self._inner, folder)

    def _checkpoint(self, step: int) -> Path:
        return Path(self._trainer.args.output_dir) / f"checkpoint-{step}"

    @property
    def _inner(self) -> nn.Module:
        inner: nn.Module = self._trainer.model_wrapped.module
        return inner

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
