"""The standard step program: several micro-batches, one clipped update.

A step program takes the micro-batches of an update and leaves new weights. Its losses are sums
scaled by the count of trained tokens of the whole update, over all ranks, before the backward pass:
so gradients simply add, over micro-batches and over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from modicum.core.events import Events
from modicum.core.sharding import whole
from modicum.core.strategy import Strategy
from modicum.data.batch import Batch
from modicum.models.llama import Llama
from modicum.tasks import CausalLM


@dataclass(frozen=True)
class Outcome:
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
    """Accumulate over micro-batches, clip, update; skip the update if anything is not finite."""

    task: CausalLM
    model: Llama
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    events: Events
    precision: str
    clip_norm: float | None
    updating: bool = False
    """Whether the optimizer is at work, so that weights may be half new."""

    def __call__(
        self, step: int, micro_batches: list[Batch], tokens: int, check: Callable[[], None]
    ) -> Outcome:
        """Do update number `step` (1-based).

        Args:
            micro_batches: this rank's.
            tokens: trained tokens of the update, over all ranks.
            check: called between micro-batches, on all ranks alike; it may raise.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.events.publish("before_update", step=step)
        try:
            mean = self._accumulate(micro_batches, tokens, check)
            self.events.publish("gradients_ready", step=step)
            norm = whole(self.strategy.norm(parameters))
            if self.clip_norm is not None:
                self.strategy.clip(parameters, self.clip_norm, norm)
            size = float(norm)
            skipped = not (math.isfinite(mean) and math.isfinite(size))
            if not skipped:
                self.events.publish("before_optimizer", step=step)
                self.updating = True
                self.strategy.update(self.optimizer)
                self.updating = False
            else:
                self.strategy.discard()
        finally:
            # Whatever happened, no gradient of half an update is left for the next.
            self.optimizer.zero_grad(set_to_none=True)
        if not skipped:
            self.events.publish("after_optimizer", step=step)
        return Outcome(mean, size, tokens, skipped)

    def _accumulate(
        self, micro_batches: list[Batch], tokens: int, check: Callable[[], None]
    ) -> float:
        """Leave the update's gradients, summed over the ranks; the mean loss over all of them."""
        device = next(self.model.parameters()).device
        total = torch.zeros((), device=device)
        for place, batch in enumerate(micro_batches):
            if place:
                check()
            loss = self.loss(batch.to(device), tokens)
            self.strategy.before_backward(last=place == len(micro_batches) - 1)
            loss.backward()
            total += loss.detach()
        self.strategy.after_backward()
        return self.strategy.ranks.sum(float(total))[0]

    def loss(self, batch: Batch, tokens: int) -> torch.Tensor:
        """A micro-batch's part of the mean loss over `tokens`."""
        with autocast(batch.input_ids.device, self.precision):
            return self.task.loss_sum(self.model, batch) / max(tokens, 1)
