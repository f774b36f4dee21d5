"""What schedules of exchanges share: the value, its ledger's question, and use in any loop.

A schedule says when gradients and weights of data parallelism travel, not what they are: the bytes
are those of an all-reduce, and so are the weights that come of it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.method import Method
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.ranks.ddp_callback import hooking_callback
from modicum.core.ranks.ddp_hook import DDPHook
from modicum.core.ranks.exchange import ExchangeContext, ExchangeQuery, ShardExchange
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange, MatrixQuery, TensorShape
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks
from modicum.core.torch_private import note_step

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


@dataclass(frozen=True)
class ScheduleQuery:
    """What a schedule's ledger is asked at.

    Args:
        layers: elements of the trained parameters of each module that holds some, in the order in
            which a forward pass comes to them; a parameter of several modules is the first's.
        ranks: how many ranks sum their gradients.
        element_bytes: bytes an element of a gradient.
        micro_batches: in an update; before the last one gradients add up in the parameters.
        saved: bytes that a forward pass has saved when it ends; there are none when it begins.
    """

    layers: tuple[tuple[int, ...], ...]
    ranks: int
    element_bytes: int = 4
    micro_batches: int = 1
    saved: int = 0


class Schedule(Method):
    """When the exchanges of data parallelism happen; the value of every method that decides it."""

    @abstractmethod
    def strategy(
        self,
        ranks: Ranks,
        layout: Layout,
        *,
        reduction: Literal["sum", "mean"] = "sum",
        link: Link | None = None,
    ) -> Strategy:
        """How ranks share a model under this schedule; its `collectives` meter what is sent.

        Args:
            reduction: `sum` where losses are scaled by the count of all ranks, `mean` where each
                rank took the mean over its own samples.
            link: a slower link to pretend, for experiments.
        """

    @abstractmethod
    def ledger(self, at: ScheduleQuery) -> Ledger:
        """Wire traffic and buffers of an update, beyond those of one process alone."""

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        reduction: Literal["sum", "mean"] = "mean",
        link: Link | None = None,
    ) -> Wrapped:
        """Train `model` with the ranks of the default process group in a loop of your own.

        All ranks get rank 0's weights and buffers, frozen ones of floating point included; only a
        base that is held in codes is left as each rank has it. Without a process group this process
        is the only rank.

        Raises:
            InputError: the schedule cannot be used so, or something else sums gradients already, or
                another rank's model has other weights.
        """
        if isinstance(model, DistributedDataParallel):
            raise InputError(
                "DistributedDataParallel, in which transformers.Trainer too wraps a model, sums "
                "gradients itself; give the model inside, in a loop of your own",
                value=type(model).__name__,
            )
        ranks = Ranks()
        if dist.is_available() and dist.is_initialized():
            ranks = Ranks(dist.get_rank(), dist.get_world_size())
        strategy = self.strategy(ranks, Layout.of(ranks.size), reduction=reduction, link=link)
        strategy.start(model)
        strategy.share_frozen(model)
        return Wrapped(strategy, optimizer)


class MatrixMethod(Method):
    """What full gradient matrices look like on the wire; the value of every such method."""

    def ddp_hook(
        self,
        model: nn.Module,
        *,
        seed: int = 0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> DDPHook:
        """Sum the gradients of a model in DistributedDataParallel so; all ranks call this.

        Args:
            seed: of the first factors, where there are some; alike on all ranks.
            scaler: the one of your loop, where it multiplies losses by a scale that changes.

        Raises:
            InputError: as `DDPHook`; or ranks differ.
        """
        return DDPHook(self._among_all(model, seed), model, scaler=scaler)

    def callback(self, trainer: Trainer) -> TrainerCallback:
        """For `trainer.add_callback` of a `transformers.Trainer` with several ranks.

        It hooks the method into the trainer's DistributedDataParallel when training begins.

        Args:
            trainer: the one that it is added to, whose seed is that of the first factors.
        """
        return hooking_callback(trainer, lambda model: self._among_all(model, trainer.args.seed))

    def _among_all(self, model: nn.Module, seed: int) -> MatrixExchange:
        ranks = Ranks(dist.get_rank(), dist.get_world_size())
        device = next(model.parameters()).device.type
        return self.bind(ExchangeContext(ranks, seed, device))

    @abstractmethod
    def bind(self, context: ExchangeContext) -> MatrixExchange:
        """The exchange among these ranks; all of them call this."""

    @abstractmethod
    def ledger(self, at: MatrixQuery) -> Ledger:
        """Bytes that a rank sends in an update, and the buffers that stand on the way."""

    def bind_rows(self, context: ExchangeContext) -> ShardExchange | None:
        """What sums where each rank owns rows of the sums; None: `bind`'s exchange does there too.

        All ranks call this.
        """
        return None

    @property
    def sums_matrices_on_rows(self) -> bool:
        """Whether `bind`'s exchange sums where each rank owns rows of the sums, too."""
        return type(self).bind_rows is MatrixMethod.bind_rows

    def ledger_of_rows(self, at: ExchangeQuery) -> Ledger | None:
        """The ledger of what `bind_rows` gives, if it gives anything."""
        return None

    def coding_flops(self, shapes: Iterable[TensorShape]) -> int:
        """Operations of an update for what is sent, and for what is made of it, at each rank."""
        return 0

    def late_part(self, calls: int) -> float:
        """The part of its bytes that can leave only when the backward pass is over.

        Args:
            calls: that it makes in an update, at least one.
        """
        return 0.0

    def dense(self, shapes: Mapping[str, TensorShape]) -> list[str]:
        """The names of the gradients that travel as they are, since nothing would be saved."""
        return []


class Wrapped:
    """A strategy and an optimizer for a loop that is not the trainer's; see `Schedule.wrap`."""

    def __init__(self, strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
        self.strategy, self.optimizer = strategy, optimizer
        self._summed = False  # whether the update's last backward pass was made

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """`loss.backward()`, while gradients travel; before the update's `last` they add up.

        After an error no gradient is left, and the update begins anew with its first pass.

        Raises:
            InputError: the update's last backward pass was made, and `step` has not been called.
        """
        if self._summed:
            raise InputError(
                "this update's last backward pass was made; call step(), or give last=False to "
                "the passes before the last one"
            )
        self.strategy.before_backward(last=last)
        try:
            loss.backward()
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)  # to which another pass would add
            raise
        self._summed = last

    def step(self, clip_norm: float | None = None) -> Tensor | None:
        """Update the weights, in place of `optimizer.step()` and `optimizer.zero_grad()`.

        Args:
            clip_norm: scale the gradients to this norm at most, and pass the update over when
                they are not finite.

        Returns:
            The norm before clipping, where `clip_norm` is given.
        """
        self._summed = False
        self.strategy.after_backward()
        norm = None
        if clip_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            norm = self.strategy.norm(parameters)
            self.strategy.clip(parameters, clip_norm, norm)
        if norm is None or math.isfinite(norm):
            self.strategy.update(self.optimizer)
        else:
            self.strategy.discard()
        note_step(self.optimizer)  # this call replaces `step`
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def flush(self) -> None:
        """Finish the update: call it before weights or the optimizer's state are read or saved."""
        self.strategy.flush()
