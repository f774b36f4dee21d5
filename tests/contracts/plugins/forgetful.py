"""A method that keeps to itself what a checkpoint should hold: a run with it resumes as another."""

from __future__ import annotations

from typing import Any, Literal

import torch

from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.method import Info
from modicum.core.contracts.run_hooks import RunHook
from modicum.data.sampler import Sampler
from modicum.optim.transform import GradientTransform, TransformContext


class Forgetting(RunHook):
    """Has a state, and no `state_dict`."""

    def __init__(self, context: TransformContext, forgets: str) -> None:
        assert context.parameters is not None
        self.parameters, self.forgets = list(context.parameters.values()), forgets
        self.moments = [torch.zeros_like(each) for each in self.parameters]
        self.generator = torch.Generator().manual_seed(context.seed)
        self.updates = 0
        if forgets == "position":
            self._count_rows_from_here()

    def after_backward(self) -> None:
        self.updates += 1
        for parameter, moment in zip(self.parameters, self.moments, strict=True):
            assert parameter.grad is not None
            if self.forgets == "moment":
                moment.mul_(0.9).add_(parameter.grad)
                parameter.grad.copy_(moment)
            elif self.forgets == "generator":
                parameter.grad += torch.randn(parameter.shape, generator=self.generator) * 1e-3
            elif self.forgets == "schedule":
                parameter.grad *= min(1.0, self.updates / 10)
            elif self.forgets == "nothing":
                parameter.grad *= 0.5

    def _count_rows_from_here(self) -> None:
        """The rows of a step become those of a count that begins with this process."""
        begun: list[int] = []
        plain = Sampler.indices

        def counted(sampler: Sampler, step: int) -> list[int]:
            begun.append(step)
            return plain(sampler, step - begun[0])

        Sampler.indices = counted  # type: ignore[method-assign]


class Forgetful(GradientTransform):
    """Gradients are changed by what no checkpoint holds.

    Args:
        forgets: what that is.
    """

    info = Info(
        name="forgetful",
        title="Forgetful: a method that resumes as another",
        room="optim",
        slot="transform",
        paper="none",
        claim="nothing",
        traits=(),
    )

    forgets: Literal["nothing", "moment", "generator", "schedule", "position"] = "nothing"

    def bind(self, context: TransformContext) -> Any:
        return Forgetting(context, self.forgets)

    def ledger(self, at: object) -> Ledger:
        return Ledger()
