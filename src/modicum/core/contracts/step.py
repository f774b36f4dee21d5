"""Step programs: what makes an update out of the micro-batches of one.

A program takes them and leaves new weights. The method of the section `optimizer` chooses it
(`Method.bind_step`): the standard one accumulates gradients over micro-batches and steps an
optimizer of PyTorch's; another may need no gradients, a second model or no optimizer. The trainer
asks the program for all that depends on it: rates, state, what a rehearsal runs.

Losses are sums scaled by the count of trained tokens of the full update, over all ranks, before the
backward pass: so gradients simply add, over micro-batches and over ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from modicum.core.clock import BACKWARD, FORWARD, WIRE
from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.contracts.method import Context
from modicum.core.contracts.parameters import is_idle
from modicum.core.contracts.run_hooks import ExtraLoss, PassKind
from modicum.core.contracts.sparse_layers import refuse_sparse_layers
from modicum.core.contracts.state import StateRegistry, optimizer_view
from modicum.core.contracts.stepping import Stepper
from modicum.core.contracts.strategy import Strategy
from modicum.core.layers.recomputing import recomputing_in
from modicum.core.ranks.observed_calls import AGREEMENT, naming
from modicum.core.ranks.sharding import is_sharded, own_part, whole


class StepTask(Protocol):
    """What a program asks of a task: outputs of a batch, and the sum of losses that they have."""

    def outputs(self, model: Any, batch: Any) -> Any:
        """What the model makes of a batch, such as logits."""

    def loss_of(self, outputs: Any, batch: Any) -> Tensor:
        """The sum of the batch's losses, given the outputs: fp32, one element."""


@dataclass(frozen=True)
class StepContext(Context):
    """What a step program is bound to.

    Args:
        task: outputs and losses of a batch.
        strategy: how ranks share the work; the ranks are `strategy.ranks`.
        groups: makes the parameter groups of an optimizer, at the recipe's learning rate, with a
            weight decay.
        precision: of forward passes.
        clip_norm: the recipe's; None: gradients are not clipped.
        hooks: what methods do in a run; they come in after the program is bound.
    """

    task: StepTask = field(kw_only=True)
    strategy: Strategy = field(default_factory=Strategy, kw_only=True)
    groups: Callable[[float], list[dict[str, Any]]] = field(kw_only=True)
    precision: str = field(default="fp32", kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    hooks: RunHooks = field(default_factory=RunHooks, kw_only=True)


@dataclass(frozen=True)
class StepOutcome:
    """What an update did.

    Args:
        loss: the task's mean loss, in nats.
        gradient_norm: before clipping; None where the program has no gradients.
        tokens: that were trained on.
        extra_loss: the sum of the terms that methods added; None where there were none.
    """

    loss: float
    gradient_norm: float | None
    tokens: int
    skipped: bool
    extra_loss: float | None = None


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The context in which a forward pass runs in the recipe's precision."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


class StepProgram(ABC):
    """Makes the updates of a run; subclasses own what they need for it.

    Attributes:
        optimizer: PyTorch's, where there is one.
        clock: where this process's time goes; who calls the program says that it is an update.
        updating: whether weights, or what methods keep, are being changed, so that they may be half
            new; who is asked to do the update once more then would do some of it twice.
        rehearsing: whether passes are run for their memory alone, and nothing is learned from them.
    """

    optimizer: torch.optim.Optimizer | None = None
    updating: bool = False
    rehearsing: bool = False

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.task, self.model = context.task, context.model
        self.strategy, self.hooks = context.strategy, context.hooks
        self.clock = context.strategy.ranks.clock
        self._between: list[Tensor] = []  # losses between passes, of an update's micro-batches

    @abstractmethod
    def __call__(
        self, step: int, micro_batches: list[Any], tokens: int, check: Callable[[], None]
    ) -> StepOutcome:
        """Do update number `step` (1-based).

        Args:
            micro_batches: this rank's.
            tokens: trained tokens of the update, over all ranks.
            check: called between micro-batches, on all ranks alike; it may raise.
        """

    @abstractmethod
    def rehearse(self, batch: Any, tokens: int) -> None:
        """The passes of a micro-batch as in an update, of which nothing is kept."""

    def set_rate(self, multiplier: float) -> float | None:
        """Set every group to its own rate times `multiplier`; the first one's, if there are any."""
        if self.optimizer is None:
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_learning_rate"] * multiplier
        return float(self.optimizer.param_groups[0]["lr"])

    def register(self, registry: StateRegistry) -> None:
        """Register the state that a checkpoint holds next to the weights."""
        if self.optimizer is not None:
            registry.add_view(optimizer_view(self.optimizer))

    def state(self) -> Iterable[Tensor]:
        """The tensors of that state that are there now."""
        held = {} if self.optimizer is None else self.optimizer.state
        return [v for state in held.values() for v in state.values() if isinstance(v, Tensor)]

    def flush(self, *, keep_gradients: bool = False) -> None:
        """Finish updates that were deferred: from here on weights may be read."""
        self.strategy.flush(keep_gradients=keep_gradients)

    def loss(self, batch: Any, tokens: int, kind: PassKind = "train") -> Tensor:
        """A micro-batch's part of the mean loss over `tokens`, by a forward pass."""
        again: PassKind = "recompute" if kind == "train" else kind
        hooks = self.hooks
        if hooks.weigh_passes:
            hooks.before_forward(batch.count / max(tokens, 1))
        with (
            self.clock(FORWARD) if kind == "train" else nullcontext(),
            recomputing_in((lambda: hooks.forward_context(again)) if hooks.enter_passes else None),
            autocast(batch.device, self.context.precision),
            hooks.forward_context(kind),
        ):
            return self.summed(batch) / max(tokens, 1)

    def summed(self, batch: Any) -> Tensor:
        """The sum of a batch's losses: the task's, of the model's outputs.

        With a loss between two passes, of the first half of the outputs of twice the rows.
        """
        if not self.hooks.pair_passes:
            return self.task.loss_of(self.task.outputs(self.model, batch), batch)
        losses, between = losses_of_pairs(self.task, self.model, batch, self.hooks.pair_loss)
        self._between.append(between.detach())
        return losses + between


def losses_of_pairs(
    task: StepTask, model: Any, batch: Any, pair_loss: Callable[[Any, Any, Any], Tensor]
) -> tuple[Tensor, Tensor]:
    """Run a batch as one of twice the rows: the task's losses of the first half, and the pair's."""
    both = task.outputs(model, batch.twice())
    first, second = rows_of(both, slice(batch.rows)), rows_of(both, slice(batch.rows, None))
    return task.loss_of(first, batch), pair_loss(first, second, batch)


def rows_of(outputs: Any, rows: slice) -> Any:
    """Some rows of what a model gives: of a tensor, or of each in a tuple, a list or a mapping.

    >>> rows_of({"logits": torch.arange(4)}, slice(2, None))
    {'logits': tensor([2, 3])}
    """
    if isinstance(outputs, Tensor):
        return outputs[rows]
    if isinstance(outputs, Mapping):
        return {name: rows_of(value, rows) for name, value in outputs.items()}
    if isinstance(outputs, tuple | list):
        return type(outputs)(rows_of(value, rows) for value in outputs)
    return outputs


class StandardStep(StepProgram):
    """Accumulate over micro-batches, clip, update; skip the update if anything is not finite.

    Args:
        optimizer: over the context's groups.

    Raises:
        InputError: a trained embedding gives sparse gradients.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, context: StepContext, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(context)
        refuse_sparse_layers(context.model)
        self.optimizer, self.clip_norm = optimizer, context.clip_norm

    def __call__(
        self, step: int, micro_batches: list[Any], tokens: int, check: Callable[[], None]
    ) -> StepOutcome:
        """Do update number `step`: see `StepProgram`."""
        self.hooks.before_update(step)
        try:
            mean, extra = self._accumulate(micro_batches, tokens, check)
            # In the backward pass weights may be new already.
            self.updating = self.updating or self.hooks.learn_from_gradients
            self.hooks.update_loss(mean)
            self.hooks.after_backward()
            norm, skipped = self._update(step, mean + (extra or 0.0))
            if not skipped:
                if self.hooks.reads_gradients:
                    self.flush(keep_gradients=True)
                self.hooks.after_optimizer(step, self.optimizer)
                if self.hooks.writes_weights:
                    self.strategy.updated()
            self.updating = False
        finally:
            # Whatever happened, no gradient of half an update is left for the next.
            self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(mean, norm, tokens, skipped, extra)

    def _update(self, step: int, mean: float) -> tuple[float, bool]:
        """Clip and update; the norm of the gradients, and whether the update was skipped."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = self.strategy.norm(parameters)
        if is_sharded(norm):
            with self.clock(WIRE), naming(AGREEMENT):
                norm = whole(norm)
        if self.clip_norm is not None:
            self.strategy.clip(parameters, self.clip_norm, norm)
        size = float(norm)
        skipped = not (math.isfinite(mean) and math.isfinite(size))
        if skipped:
            self.strategy.discard()
        else:
            self.hooks.before_optimizer(step)
            self.updating = True
            self.strategy.update(self.optimizer)
        return size, skipped

    def _accumulate(
        self, micro_batches: list[Any], tokens: int, check: Callable[[], None]
    ) -> tuple[float, float | None]:
        """Leave the update's gradients, summed over the ranks; the mean loss, and extra terms."""
        device = next(self.model.parameters()).device
        total, extra = torch.zeros((), device=device), None
        self._between.clear()
        for place, batch in enumerate(micro_batches):
            if place:
                check()
            loss = self.loss(batch.to(device), tokens)
            total += loss.detach()
            last = place == len(micro_batches) - 1
            if last and (terms := self.hooks.extra_losses()):
                extra = self._weighed(terms)
                loss = loss + extra
            self.strategy.before_backward(last=last)
            with self.clock(BACKWARD):
                loss.backward()
        self.strategy.after_backward()
        known = [] if extra is None else [float(extra.detach())]
        own = float(total)
        if self._between:
            known.append(float(torch.stack(self._between).sum()) / max(tokens, 1))
            own -= known[-1]
        if (added_there := self.hooks.added_loss()) is not None:
            known.append(added_there)
        if not known:
            return self.strategy.ranks.sum(own)[0], None
        mean, added = self.strategy.ranks.sum(own, sum(known))
        return mean, added

    def _weighed(self, terms: Sequence[ExtraLoss]) -> Tensor:
        """This rank's part of the extra terms, each over its count on all ranks."""
        counts = self.strategy.ranks.sum(*(term.count for term in terms))
        pairs = zip(terms, counts, strict=True)
        return torch.stack([term.sum.float() / max(count, 1e-30) for term, count in pairs]).sum()

    def rehearse(self, batch: Any, tokens: int) -> None:
        """Forward and backward of a micro-batch as in an update, of which nothing is kept."""
        self.strategy.before_backward(last=False)
        self._rehearsed(batch, tokens).backward()

    def _rehearsed(self, batch: Any, tokens: int) -> Tensor:
        """The loss of a rehearsal, with the terms that an update's last micro-batch has."""
        loss = self.loss(batch, tokens, "rehearse")
        # After the forward pass, as in an update: a term may be about what was seen there.
        return sum((term.sum.float() for term in self.hooks.extra_losses()), loss)


class InBackwardStep(StandardStep):
    """Update each parameter in the backward pass, as soon as its gradient is final, and free it.

    The gradients are never all there, so they are not clipped; a parameter whose own gradient is
    not finite is left as it is, and the update counts as skipped.
    """

    def __init__(self, context: StepContext, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(context, optimizer)
        self._stepper = Stepper(self.optimizer)
        self._squares: list[Tensor] = []
        self.strategy.when_ready(self.model, self._ready)

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if not self.rehearsing and not is_idle(parameter):
            square = own_part(gradient)[0].float().square().sum()
            self._squares.append(square)
            if self._finite(square, shared=is_sharded(gradient)):
                self.updating = True
                self._stepper.step([parameter])
        parameter.grad = None

    def _finite(self, square: Tensor, *, shared: bool) -> bool:
        """Whether a gradient is finite, on all ranks where each has a part of it."""
        finite = bool(torch.isfinite(square))
        return bool(self.strategy.ranks.min(finite)[0]) if shared else finite

    def _update(self, step: int, mean: float) -> tuple[float, bool]:
        self.strategy.updated()
        square = float(torch.stack(self._squares).sum()) if self._squares else 0.0
        self._squares.clear()
        if self.strategy.layout.shards > 1:
            square = self.strategy.ranks.sum(square)[0] / self.strategy.layout.replicas
        size = math.sqrt(square)
        return size, not (math.isfinite(mean) and math.isfinite(size))

    def rehearse(self, batch: Any, tokens: int) -> None:
        """As in an update: gradients are freed one by one, and no weight changes."""
        self.rehearsing = True
        try:
            self.strategy.before_backward(last=True)
            self._rehearsed(batch, tokens).backward()
            self.strategy.after_backward()
        finally:
            self.rehearsing = False
