"""The standard step program: several micro-batches, one clipped update.

A step program takes the micro-batches of an update and leaves new weights. Its losses are sums
scaled by the count of trained tokens of the full update, over all ranks, before the backward pass:
so gradients simply add, over micro-batches and over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from modicum.core.contracts.stepping import Stepper
from modicum.core.contracts.strategy import Strategy
from modicum.core.layers.saved_tensors import Shares
from modicum.core.ranks.sharding import is_sharded, own_part, whole
from modicum.data.rows import AnyBatch
from modicum.tasks import AnyTask
from modicum.trainer.events import Events


class GradientTransformer(Protocol):
    """What a method of the slot `transform` binds to."""

    def capturing(self, on: bool = True) -> AbstractContextManager[object]:
        """Read along while a micro-batch's forward and backward pass run; or do not."""

    def apply(self) -> None:
        """Change the final gradients of an update, before they are clipped."""


class ActivationRuntime(Protocol):
    """What a method of the slot `memory` binds to."""

    measured: Shares | None
    """What was left of saved activations after the last forward pass."""

    @property
    def measuring(self) -> bool:
        """Whether `observe` reads anything in the update at hand."""

    def context(self) -> AbstractContextManager[object]:
        """Keep activations the method's way in a forward pass, until its backward pass is done."""

    def before_update(self) -> None:
        """Forget what was seen since the last update, such as a rehearsal's."""

    def observe(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the optimizer's state of an update that was made; gradients are there yet."""

    def after_step(self, step: int) -> None:
        """Learn from an update that was made."""


@dataclass(frozen=True)
class StepOutcome:
    """What an update did: mean loss in nats, norm of the gradients before clipping, its tokens."""

    loss: float
    gradient_norm: float
    tokens: int
    skipped: bool


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The context in which a forward pass runs in the recipe's precision."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


@dataclass
class StandardStep:
    """Accumulate over micro-batches, clip, update; skip the update if anything is not finite.

    Args:
        transform: changes the update's gradients before they are clipped.
        policy: how activations are kept between forward and backward.
        rehearsing: whether passes are run for their memory alone, and nothing is learnt from them.
    """

    task: AnyTask
    model: Any
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    events: Events
    precision: str
    clip_norm: float | None
    transform: GradientTransformer | None = None
    policy: ActivationRuntime | None = None
    updating: bool = False
    """Whether the optimizer is at work, so that weights may be half new."""
    rehearsing: bool = False

    def __call__(
        self, step: int, micro_batches: list[Any], tokens: int, check: Callable[[], None]
    ) -> StepOutcome:
        """Do update number `step` (1-based).

        Args:
            micro_batches: this rank's.
            tokens: trained tokens of the update, over all ranks.
            check: called between micro-batches, on all ranks alike; it may raise.
        """
        self.events.publish("before_update", step=step)
        if self.policy is not None:
            self.policy.before_update()
        try:
            mean = self._accumulate(micro_batches, tokens, check)
            norm, skipped = self._update(step, mean)
            if self.policy is not None and self.policy.measuring and not skipped:
                self.strategy.flush(keep_gradients=True)
                self.policy.observe(self.optimizer)
        finally:
            # Whatever happened, no gradient of half an update is left for the next.
            self.optimizer.zero_grad(set_to_none=True)
        if not skipped:
            self.events.publish("after_optimizer", step=step)
            if self.policy is not None:
                self.policy.after_step(step)
        return StepOutcome(mean, norm, tokens, skipped)

    def _update(self, step: int, mean: float) -> tuple[float, bool]:
        """Clip and update; the norm of the gradients, and whether the update was skipped."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.transform is not None:
            self.transform.apply()
        self.events.publish("gradients_ready", step=step)
        norm = whole(self.strategy.norm(parameters))
        if self.clip_norm is not None:
            self.strategy.clip(parameters, self.clip_norm, norm)
        size = float(norm)
        skipped = not (math.isfinite(mean) and math.isfinite(size))
        if skipped:
            self.strategy.discard()
        else:
            self.events.publish("before_optimizer", step=step)
            self.updating = True
            self.strategy.update(self.optimizer)
            self.updating = False
        return size, skipped

    def _accumulate(
        self, micro_batches: list[Any], tokens: int, check: Callable[[], None]
    ) -> float:
        """Leave the update's gradients, summed over the ranks; the mean loss over all of them."""
        device = next(self.model.parameters()).device
        total = torch.zeros((), device=device)
        for place, batch in enumerate(micro_batches):
            if place:
                check()
            with self._capturing():
                loss = self.loss(batch.to(device), tokens)
                self.strategy.before_backward(last=place == len(micro_batches) - 1)
                loss.backward()
            total += loss.detach()
        self.strategy.after_backward()
        return self.strategy.ranks.sum(float(total))[0]

    def _capturing(self, on: bool = True) -> AbstractContextManager[object]:
        return nullcontext() if self.transform is None else self.transform.capturing(on)

    def loss(self, batch: AnyBatch, tokens: int) -> torch.Tensor:
        """A micro-batch's part of the mean loss over `tokens`."""
        kept = nullcontext() if self.policy is None else self.policy.context()
        with autocast(batch.device, self.precision), kept:
            return self.task.loss_sum(self.model, batch) / max(tokens, 1)

    def rehearse(self, batch: AnyBatch, tokens: int) -> None:
        """Forward and backward of a micro-batch as in an update, of which nothing is kept."""
        with self._capturing(False):
            self.strategy.before_backward(last=False)
            self.loss(batch, tokens).backward()


@dataclass
class InBackwardStep(StandardStep):
    """Update each parameter in the backward pass, as soon as its gradient is final, and free it.

    The gradients are never all there, so they are not clipped; a parameter whose own gradient is
    not finite is left as it is, and the update counts as skipped.
    """

    def __post_init__(self) -> None:
        self._stepper = Stepper(self.optimizer)
        self._squares: list[torch.Tensor] = []
        self.strategy.when_ready(self.model, self._ready)

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if not self.rehearsing:
            square = own_part(gradient)[0].float().square().sum()
            self._squares.append(square)
            if self._finite(square, shared=is_sharded(gradient)):
                self.updating = True
                self._stepper.step([parameter])
        parameter.grad = None

    def _finite(self, square: torch.Tensor, *, shared: bool) -> bool:
        """Whether a gradient is finite, on all ranks where each has a part of it."""
        finite = bool(torch.isfinite(square))
        return bool(self.strategy.ranks.min(finite)[0]) if shared else finite

    def _update(self, step: int, mean: float) -> tuple[float, bool]:
        self.strategy.updated()
        self.updating = False
        self.events.publish("gradients_ready", step=step)
        square = float(torch.stack(self._squares).sum()) if self._squares else 0.0
        self._squares.clear()
        if self.strategy.layout.shards > 1:
            square = self.strategy.ranks.sum(square)[0] / self.strategy.layout.replicas
        size = math.sqrt(square)
        return size, not (math.isfinite(mean) and math.isfinite(size))

    def rehearse(self, batch: AnyBatch, tokens: int) -> None:
        """As in an update: gradients are freed one by one, and no weight changes."""
        self.rehearsing = True
        try:
            self.strategy.before_backward(last=True)
            self.loss(batch, tokens).backward()
            self.strategy.after_backward()
        finally:
            self.rehearsing = False
