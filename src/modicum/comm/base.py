"""What methods share that say when gradients travel, or what they are: values, use in any loop.

A schedule says when gradients and weights of data parallelism travel, not what they are: the bytes
are those of an all-reduce, and so are the weights that come of it. A method of matrices says what
gradients are on the wire.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.method import Method
from modicum.core.contracts.parameters import trainable
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.ranks.agreement import same_terms
from modicum.core.ranks.ddp_callback import hooking_callback
from modicum.core.ranks.ddp_hook import DDPHook
from modicum.core.ranks.exchange import SHARD, ExchangeContext, ExchangeQuery, ShardExchange
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange, MatrixQuery, TensorShape
from modicum.core.ranks.matrix_replicas import MatrixReplicas
from modicum.core.ranks.one_rank import NOTHING_TRAVELS, warn_of_one_rank
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import is_sharded
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


class HooklessMethod(Method):
    """A method that does more than a hook of DistributedDataParallel can, and says so if asked."""

    why_no_hook: ClassVar[str]
    """Why, and what to do instead."""

    def ddp_hook(self, model: nn.Module, **_: object) -> NoReturn:
        """Refuse it.

        Raises:
            InputError: always.
        """
        raise InputError(self.why_no_hook, value=self.info.name)

    def callback(self, trainer: Trainer) -> NoReturn:
        """Refuse it: `transformers.Trainer` wraps its model in DistributedDataParallel.

        Raises:
            InputError: always.
        """
        raise InputError(self.why_no_hook, value=self.info.name)


class Schedule(HooklessMethod):
    """When the exchanges of data parallelism happen; the value of every method that decides it."""

    why_no_hook: ClassVar[str] = (
        "it decides when weights are updated too, and a hook of DistributedDataParallel, in which "
        "transformers.Trainer wraps its model, sums gradients alone; call wrap(model, optimizer) "
        "in a loop of your own, or take DenseSums, PowerSGD or ACPSGD, which have hooks"
    )

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
        ranks = _ranks_of_replicas(model)
        # Before it makes a group, for which a rank with an exchange of matrices would not come.
        same_terms(ranks, "exchange", {"kind": type(self).__name__, **self.model_dump(mode="json")})
        strategy = self.strategy(ranks, Layout.of(ranks.size), reduction=reduction, link=link)
        return _wrapped(strategy, model, optimizer)


class MatrixMethod(Method):
    """What full gradient matrices look like on the wire; the value of every such method."""

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        reduction: Literal["sum", "mean"] = "mean",
        seed: int = 0,
        link: Link | None = None,
    ) -> Wrapped:
        """Train `model` with the ranks of the default process group in a loop of your own.

        Gradients are summed in buckets while the last backward pass of an update runs; what they
        leave is owed once `step` has updated the weights. All ranks get rank 0's weights and
        buffers, frozen ones of floating point included. Without a process group this process is
        the only rank, and nothing travels. `strategy.matrices` of what is returned is the
        exchange, whose `views` a checkpoint holds.

        Args:
            reduction: `sum` where losses are scaled by the count of all ranks, `mean` where each
                rank took the mean over its own samples.
            seed: of the first factors, where there are some; alike on all ranks.
            link: a slower link to pretend, for experiments.

        Raises:
            InputError: something else sums gradients already, or a parameter is not taken, or
                another rank has another method or other weights.

        >>> from modicum.comm import ACPSGD
        >>> from modicum.core.ranks.ranks import joined
        >>> model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        >>> with joined():  # the ranks that torchrun has started
        ...     handle = ACPSGD(rank=2).wrap(model, optimizer)
        ...     for _ in range(10):
        ...         inputs = torch.randn(8, 16)
        ...         handle.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
        ...         _ = handle.step(clip_norm=1.0)
        """
        ranks = _ranks_of_replicas(model)
        exchange = self._among(ranks, model, seed, {} if link is None else {SHARD: link})
        strategy = MatrixReplicas(ranks, exchange, mean=reduction == "mean")
        return _wrapped(strategy, model, optimizer)

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
        hook = DDPHook(self._among(_default_ranks(), model, seed), model, scaler=scaler)
        if hook.exchange.ranks.alone:
            warn_of_one_rank(NOTHING_TRAVELS)
        return hook

    def callback(self, trainer: Trainer) -> TrainerCallback:
        """For `trainer.add_callback` of a `transformers.Trainer` with several ranks.

        It hooks the method into the trainer's DistributedDataParallel when training begins.

        Args:
            trainer: the one that it is added to, whose seed is that of the first factors.
        """
        return hooking_callback(
            trainer, lambda model: self._among(_default_ranks(), model, trainer.args.seed)
        )

    def _among(
        self, ranks: Ranks, model: nn.Module, seed: int, links: Mapping[str, Link] | None = None
    ) -> MatrixExchange:
        device = next(model.parameters()).device.type
        return self.bind(ExchangeContext(ranks, seed, device, links or {}))

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
    """A strategy and an optimizer for a loop that is not the trainer's.

    `Schedule.wrap` and `MatrixMethod.wrap` make it. Sums of trained parameters that the
    optimizer does not have stay until the next update begins.
    """

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.strategy, self.optimizer = strategy, optimizer
        self._known = {id(parameter): parameter for _, parameter in trainable(model)}
        self._begun = False  # whether a backward pass of the update was made
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
        if not self._begun:
            self._clear_others()
        self._begun = True
        self.strategy.before_backward(last=last)
        try:
            loss.backward()
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)  # to which another pass would add
            self._begun = False
            raise
        self._summed = last

    def _clear_others(self) -> None:
        """Forget the sums of what the optimizer does not have: added to, they would grow."""
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in self._known.values():
            if id(parameter) not in own:
                parameter.grad = None

    def step(self, clip_norm: float | None = None) -> Tensor | None:
        """Update the weights, in place of `optimizer.step()` and `optimizer.zero_grad()`.

        Args:
            clip_norm: scale the gradients to this norm at most, and pass the update over when
                they are not finite.

        Returns:
            The norm before clipping, where `clip_norm` is given.

        Raises:
            InputError: a parameter has a gradient that no rank sums: it was frozen when the model
                was wrapped, or is not the model's.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if others := [p for p in parameters if p.grad is not None and id(p) not in self._known]:
            self._summed = self._begun = False
            self.strategy.before_backward(last=False)  # a model that is wrapped again has its hooks
            raise InputError(
                "gradients of parameters that were frozen when the model was wrapped, or are not "
                "the model's, are summed over no ranks; wrap the model again where others are to "
                "be trained",
                field="optimizer",
                value=", ".join(str(list(parameter.shape)) for parameter in others[:3]),
            )
        self._summed = self._begun = False
        self.strategy.after_backward()
        norm = None
        if clip_norm is not None:
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


def _default_ranks() -> Ranks:
    """Those of the default process group; without one, this process alone."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks()


def _ranks_of_replicas(model: nn.Module) -> Ranks:
    """The same, of which each is to hold all of a model, whose gradients nobody sums yet."""
    if isinstance(model, DistributedDataParallel):
        raise InputError(
            "DistributedDataParallel, in which transformers.Trainer too wraps a model, sums "
            "gradients itself; give the model inside, in a loop of your own",
            value=type(model).__name__,
        )
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise InputError(
                "a sharded weight's gradient is summed where it is sharded; give a model of which "
                "each rank holds all weights",
                field=name,
            )
    return _default_ranks()


def _wrapped(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    strategy.start(model)
    strategy.share_frozen(model)
    if strategy.ranks.alone:
        warn_of_one_rank(NOTHING_TRAVELS)
    return Wrapped(strategy, model, optimizer)
