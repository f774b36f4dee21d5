"""The standard step program: several micro-batches, one clipped update.

A step program takes the micro-batches of an update and leaves new weights. Its losses are sums
scaled by the update's count of trained tokens before the backward pass, so gradients simply add.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from modicum.core.events import Events
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
    events: Events
    precision: str
    clip_norm: float | None

    def __call__(self, step: int, micro_batches: list[Batch], check: Callable[[], None]) -> Outcome:
        """Do update number `step` (1-based); `check` may raise between micro-batches."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        device = parameters[0].device
        tokens = sum(batch.trained_tokens for batch in micro_batches)
        self.events.publish("before_update", step=step)
        total = torch.zeros((), device=device)
        try:
            for batch in micro_batches:
                check()
                with autocast(device, self.precision):
                    loss = self.task.loss_sum(self.model, batch.to(device)) / max(tokens, 1)
                loss.backward()
                total += loss.detach()
            self.events.publish("gradients_ready", step=step)
            norm = torch.nn.utils.clip_grad_norm_(
                parameters, math.inf if self.clip_norm is None else self.clip_norm
            )
            mean, size = float(total), float(norm)
            skipped = not (math.isfinite(mean) and math.isfinite(size))
            if not skipped:
                self.events.publish("before_optimizer", step=step)
                self.optimizer.step()
        finally:
            # Whatever happened, no gradient of half an update is left for the next.
            self.optimizer.zero_grad(set_to_none=True)
        if not skipped:
            self.events.publish("after_optimizer", step=step)
        return Outcome(mean, size, tokens, skipped)
