"""The standard step program: several micro-batches, one clipped update.

A step program takes the micro-batches of an update and leaves new weights. Its losses are sums
scaled by the count of trained tokens of the full update, over all ranks, before the backward pass:
so gradients simply add, over micro-batches and over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from modicum.core.contracts.run_hooks import ExtraLoss, PassKind, RunHooks
from modicum.core.contracts.stepping import Stepper
from modicum.core.contracts.strategy import Strategy
from modicum.core.layers.recomputing import recomputing_in
from modicum.core.ranks.sharding import is_sharded, own_part, whole
from modicum.data.rows import AnyBatch
from modicum.tasks import AnyTask


@dataclass(frozen=True)
class StepOutcome:
    """What an update did.

    Args:
        loss: the task's mean loss, in nats.
        gradient_norm: before clipping.
        tokens: that were trained on.
        extra_loss: the sum of the terms that methods added; None where there were none.
    """

    loss: float
    gradient_norm: float
    tokens: int
    skipped: bool
    extra_loss: float | None = None


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The context in which a forward pass runs in the recipe's precision."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


@dataclass
class StandardStep:
    """Accumulate over micro-batches, clip, update; skip the update if anything is not finite.

    Args:
        hooks: what methods do in an update.
        rehearsing: whether passes are run for their memory alone, and nothing is learned from them.
    """

    task: AnyTask
    model: Any
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    precision: str
    clip_norm: float | None
    hooks: RunHooks = field(default_factory=RunHooks)
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
        self.hooks.before_update(step)
        try:
            mean, extra = self._accumulate(micro_batches, tokens, check)
            self.hooks.after_backward()
            norm, skipped = self._update(step, mean + (extra or 0.0))
            if not skipped:
                if self.hooks.reads_gradients:
                    self.strategy.flush(keep_gradients=True)
                self.hooks.after_optimizer(step, self.optimizer)
        finally:
            # Whatever happened, no gradient of half an update is left for the next.
            self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(mean, norm, tokens, skipped, extra)

    def _update(self, step: int, mean: float) -> tuple[float, bool]:
        """Clip and update; the norm of the gradients, and whether the update was skipped."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = whole(self.strategy.norm(parameters))
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
            self.updating = False
        return size, skipped

    def _accumulate(
        self, micro_batches: list[Any], tokens: int, check: Callable[[], None]
    ) -> tuple[float, float | None]:
        """Leave the update's gradients, summed over the ranks; the mean loss, and extra terms."""
        device = next(self.model.parameters()).device
        total, extra = torch.zeros((), device=device), None
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
            loss.backward()
        self.strategy.after_backward()
        if extra is None:
            return self.strategy.ranks.sum(float(total))[0], None
        mean, added = self.strategy.ranks.sum(float(total), float(extra.detach()))
        return mean, added

    def _weighed(self, terms: Sequence[ExtraLoss]) -> torch.Tensor:
        """This rank's part of the extra terms, each over its count on all ranks."""
        counts = self.strategy.ranks.sum(*(term.count for term in terms))
        pairs = zip(terms, counts, strict=True)
        return torch.stack([term.sum.float() / max(count, 1e-30) for term, count in pairs]).sum()

    def loss(self, batch: AnyBatch, tokens: int, kind: PassKind = "train") -> torch.Tensor:
        """A micro-batch's part of the mean loss over `tokens`."""
        again: PassKind = "recompute" if kind == "train" else kind
        hooks = self.hooks
        with (
            recomputing_in((lambda: hooks.forward_context(again)) if hooks.enter_passes else None),
            autocast(batch.device, self.precision),
            self.hooks.forward_context(kind),
        ):
            return self.task.loss_sum(self.model, batch) / max(tokens, 1)

    def rehearse(self, batch: AnyBatch, tokens: int) -> None:
        """Forward and backward of a micro-batch as in an update, of which nothing is kept."""
        self.strategy.before_backward(last=False)
        self._rehearsed(batch, tokens).backward()

    def _rehearsed(self, batch: AnyBatch, tokens: int) -> torch.Tensor:
        """The loss of a rehearsal, with the terms that an update's last micro-batch has."""
        terms = [term.sum.float() for term in self.hooks.extra_losses()]
        return sum(terms, self.loss(batch, tokens, "rehearse"))


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
            self._rehearsed(batch, tokens).backward()
            self.strategy.after_backward()
        finally:
            self.rehearsing = False
