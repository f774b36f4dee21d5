"""A method that computes no gradient: two forward passes, and a seeded difference (MeZO, SPSA).

Source: Malladi et al., arXiv 2305.17333, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from modicum.core.contracts.ledger import Entry, Ledger, OptimizerQuery
from modicum.core.contracts.method import Info, Method, PositiveFloat
from modicum.core.contracts.step import StepContext, StepOutcome, StepProgram
from modicum.core.random import derive_seed, normal_
from modicum.core.ranks.sharding import own_part


class ForwardOnlyStep(StepProgram):
    """theta - rate z (L(theta + e z) - L(theta - e z)) / 2e, z by seed, step and name."""

    def __init__(self, context: StepContext, epsilon: float) -> None:
        super().__init__(context)
        self.epsilon, self.rate = epsilon, 0.0
        self.trained = dict(self.strategy.trained(self.model))
        self.peak_rate = float(context.groups(0.0)[0]["base_learning_rate"])

    @torch.no_grad()
    def __call__(
        self, step: int, micro_batches: list[Any], tokens: int, check: Callable[[], None]
    ) -> StepOutcome:
        self.hooks.before_update(step)
        self.updating = True  # until weights are where they belong, nobody may begin anew
        self.move(step, self.epsilon)
        up = self.mean(micro_batches, tokens)
        self.move(step, -2 * self.epsilon)
        down = self.mean(micro_batches, tokens)
        slope = (up - down) / (2 * self.epsilon)
        skipped = not math.isfinite(slope)
        self.hooks.before_optimizer(step)
        self.move(step, self.epsilon - (0.0 if skipped else self.rate * slope))
        self.updating = False
        if not skipped:
            self.hooks.after_optimizer(step, None)
        return StepOutcome((up + down) / 2, abs(slope), tokens, skipped)

    def mean(self, micro_batches: list[Any], tokens: int) -> float:
        device = next(self.model.parameters()).device
        total = sum(float(self.loss(batch.to(device), tokens)) for batch in micro_batches)
        self.strategy.rest(self.model)
        return float(self.strategy.ranks.sum(total)[0])

    def move(self, step: int, size: float) -> None:
        seed = derive_seed(self.context.seed, f"direction {step}")
        for name, parameter in self.trained.items():
            part, before = own_part(parameter)
            offset = before * math.prod(parameter.shape[1:])
            direction = normal_(torch.empty_like(part), seed=seed, name=name, offset=offset)
            part.add_(direction, alpha=size)

    @torch.no_grad()
    def rehearse(self, batch: Any, tokens: int) -> None:
        self.loss(batch, tokens, "rehearse")

    def set_rate(self, multiplier: float) -> float:
        self.rate = self.peak_rate * multiplier
        return self.rate


class ForwardOnly(Method):
    """Updates by the difference of two losses.

    Args:
        epsilon: how far along a random direction the two are.
    """

    info = Info(
        name="forward_only",
        title="Forward only: updates by the difference of two losses",
        room="optim",
        slot="optimizer",
        paper="2305.17333",
        claim="the memory of inference",
        traits=("needs_no_gradients", "exact_resume"),
    )

    epsilon: PositiveFloat = 1e-3

    def bind_step(self, context: StepContext) -> StepProgram:
        return ForwardOnlyStep(context, self.epsilon)

    def ledger(self, at: OptimizerQuery) -> Ledger:
        # Drawing a normal number takes 60 bytes with its own four, one parameter after the other.
        largest = max(math.prod(parameter.shape) for parameter in at.parameters)
        return Ledger.of(Entry("workspace", 60 * largest, ("step",), "a direction"))
