"""The training loop of all proofs: updates along a schedule, with room for what an arm adds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.contracts.strategy import Strategy
from modicum.core.ranks.sharding import whole

Hook = Callable[[int], bool | None]


@dataclass(frozen=True)
class RateSchedule:
    """The factor on each group's own learning rate: up on a line, down on a line or a cosine.

    Args:
        warm_up: updates until it is up; below 1, the share of all updates.
        last: what it comes down to.
        delayed: whether it stays up until the warm-up is over, and comes down from there.

    >>> halving = RateSchedule(2, "line", last=0.5)
    >>> [halving(step, 4) for step in range(4)]
    [0.5, 0.875, 0.75, 0.625]
    """

    warm_up: float = 0
    shape: Literal["line", "cosine"] = "line"
    last: float = 0.0
    delayed: bool = False

    def __call__(self, step: int, steps: int) -> float:
        """The factor of update `step`, the first being 0, of so many."""
        warm = max(1, round(self.warm_up * steps)) if 0 < self.warm_up < 1 else self.warm_up
        up = min(1.0, (step + 1) / warm) if warm else 1.0
        start = warm if self.delayed else 0
        done = max(0.0, step - start) / max(1, steps - start)
        left = 1 - done if self.shape == "line" else 0.5 * (1 + math.cos(math.pi * done))
        return up * (self.last + (1 - self.last) * left)


def train(
    optimizers: Sequence[Optimizer],
    loss: Callable[[int], Tensor],
    steps: int,
    *,
    schedule: RateSchedule = RateSchedule(),
    clip: float | None = None,
    before_update: Hook | None = None,
    after_update: Hook | None = None,
    strategy: Strategy | None = None,
    hooks: RunHooks | None = None,
) -> list[float]:
    """Make updates; the seconds of each.

    Args:
        optimizers: are read anew for each update. A group's own rate is its `base_learning_rate`,
            or where it has none the rate that it came with.
        loss: the loss of update `step`, by a forward pass.
        clip: the largest norm of all gradients together.
        before_update: is called with `step` when gradients are there, before they are clipped.
        after_update: is called with `step` when weights are updated; True ends the training. What
            it takes is not in the seconds.
        strategy: how several ranks share the work; None where there is one.
        hooks: methods that take part, with terms of the loss of their own.
    """
    strategy, hooks, seconds = strategy or Strategy(), hooks or RunHooks(), []
    for step in range(steps):
        started = time.perf_counter()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                own = group.setdefault("base_learning_rate", group["lr"])
                group["lr"] = own * schedule(step, steps)
        hooks.before_update(step + 1)
        with hooks.forward_context("train"):
            total = loss(step)
            for term in hooks.extra_losses():
                total = total + term.sum / term.count
        strategy.before_backward(last=True)
        total.backward()
        strategy.after_backward()
        hooks.after_backward()
        if before_update is not None:
            before_update(step)
        if clip is not None:
            _clip(strategy, optimizers, clip)
        hooks.before_optimizer(step + 1)
        for optimizer in optimizers:
            strategy.update(optimizer)
            hooks.after_optimizer(step + 1, optimizer)
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        if after_update is not None and after_update(step):
            break
    return seconds


def _clip(strategy: Strategy, optimizers: Sequence[Optimizer], largest: float) -> None:
    parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    strategy.clip(parameters, largest, whole(strategy.norm(parameters)))
