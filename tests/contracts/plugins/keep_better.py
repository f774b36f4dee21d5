"""A method without gradients and without a rate: a random step is kept where the loss is lower.

Source: Rechenberg, "Evolutionsstrategie", 1973: one parent, one child, the rule of one in five.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from modicum.core.contracts.ledger import Entry, Ledger, OptimizerQuery
from modicum.core.contracts.method import Info, Method, PositiveFloat
from modicum.core.contracts.state import StateRegistry
from modicum.core.contracts.step import StepContext, StepOutcome, StepProgram
from modicum.core.random import derive_seed, normal_
from modicum.core.ranks.sharding import own_part


class KeepBetterStep(StepProgram):
    """theta + s z where its loss is lower; s grows by 3/2 then, and shrinks by its fourth root."""

    def __init__(self, context: StepContext, scale: float) -> None:
        super().__init__(context)
        self.trained = dict(self.strategy.trained(self.model))
        device = next(self.model.parameters()).device
        self.scale = torch.full((1,), scale, dtype=torch.float64, device=device)
        self.log: list[tuple[float, float]] = []  # both losses of each update

    @torch.no_grad()
    def __call__(
        self, step: int, micro_batches: list[Any], tokens: int, check: Callable[[], None]
    ) -> StepOutcome:
        self.hooks.before_update(step)
        here = self.mean(micro_batches, tokens)
        before = {name: own_part(p)[0].clone() for name, p in self.trained.items()}
        self.updating = True
        self.move(step)
        there = self.mean(micro_batches, tokens)
        kept, skipped = there < here, not math.isfinite(here)
        if not kept:
            for name, parameter in self.trained.items():
                own_part(parameter)[0].copy_(before[name])
        self.updating = False
        if not skipped:
            self.scale.mul_(1.5 if kept else 1.5**-0.25)
            self.log.append((here, there))
            self.hooks.after_optimizer(step, None)
        return StepOutcome(here, None, tokens, skipped)

    def mean(self, micro_batches: list[Any], tokens: int) -> float:
        device = next(self.model.parameters()).device
        total = sum(float(self.loss(batch.to(device), tokens)) for batch in micro_batches)
        self.strategy.rest(self.model)
        return float(self.strategy.ranks.sum(total)[0])

    def move(self, step: int) -> None:
        seed = derive_seed(self.context.seed, f"child {step}")
        for name, parameter in self.trained.items():
            part, before = own_part(parameter)
            offset = before * math.prod(parameter.shape[1:])
            direction = normal_(torch.empty_like(part), seed=seed, name=name, offset=offset)
            part.add_(direction, alpha=float(self.scale))

    @torch.no_grad()
    def rehearse(self, batch: Any, tokens: int) -> None:
        self.loss(batch, tokens, "rehearse")

    def register(self, registry: StateRegistry) -> None:
        registry.add("search", self.state_dict, self.load_state_dict)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "log": torch.tensor(self.log, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale.copy_(state["scale"])
        self.log = [(here, there) for here, there in state["log"].tolist()]

    def state(self) -> Iterable[Tensor]:
        return [self.scale]


class KeepBetter(Method):
    """Keeps random steps that make the loss lower.

    Args:
        scale: how far the first one goes.
    """

    info = Info(
        name="keep_better",
        title="Keep better: random steps that make the loss lower",
        room="optim",
        slot="optimizer",
        paper="none",
        claim="trains by comparisons alone",
        traits=("needs_no_gradients", "takes_no_rate", "exact_resume"),
    )

    scale: PositiveFloat = 1e-2

    def bind_step(self, context: StepContext) -> KeepBetterStep:
        return KeepBetterStep(context, self.scale)

    def ledger(self, at: OptimizerQuery) -> Ledger:
        # Drawing a normal number takes 60 bytes with its own four, one parameter after the other.
        largest = max(math.prod(parameter.shape) for parameter in at.parameters)
        held = sum(parameter.bytes for parameter in at.parameters)
        return Ledger.of(
            Entry("optimizer", 8, what="how far a step goes"),
            Entry("workspace", 60 * largest, ("step",), "a direction"),
            Entry("workspace", held, ("forward", "loss", "step"), "weights before the step"),
        )
