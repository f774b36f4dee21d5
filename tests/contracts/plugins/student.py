"""A method with a teacher: a slow mean of the weights, whose outputs the model is to match too."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.core.contracts.ledger import Entry, Ledger, OptimizerQuery
from modicum.core.contracts.method import Info, Method, NonNegativeFloat, Probability
from modicum.core.contracts.run_hooks import RunHook
from modicum.core.contracts.step import StandardStep, StepContext
from modicum.optim import SGD


class TaughtStep(RunHook, StandardStep):
    """The standard program on a loss with a second term, by a second model."""

    def __init__(self, context: StepContext, weight: float, decay: float) -> None:
        super().__init__(context, SGD.value(momentum=0.9).bind(context.groups(0.0)))
        self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.weight, self.decay = weight, decay
        self.hooks.add("teacher", self)

    def summed(self, batch: Any) -> Tensor:
        outputs = self.task.outputs(self.model, batch)
        with torch.no_grad():
            taught = self.task.outputs(self.teacher, batch)
        mine, theirs = (F.log_softmax(each.float(), -1) for each in (outputs, taught))
        apart = F.kl_div(mine, theirs, reduction="none", log_target=True).sum(-1)
        counted = (batch.labels != -100).float()
        return self.task.loss_of(outputs, batch) + self.weight * (apart * counted).sum()

    @torch.no_grad()
    def after_optimizer(self, step: int, optimizer: object) -> None:
        for slow, now in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            slow.lerp_(now, 1 - self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.teacher.named_parameters())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self.teacher.named_parameters():
            parameter.copy_(state[name])

    def state(self) -> Iterable[Tensor]:
        return [*super().state(), *self.teacher.parameters()]


class Student(Method):
    """Trains next to a slow mean of its own weights."""

    info = Info(
        name="student",
        title="Student: a slow mean of the weights as a teacher",
        room="optim",
        slot="optimizer",
        paper="none",
        claim="steadier",
        traits=("exact_resume",),
    )

    weight: NonNegativeFloat = 1.0
    decay: Probability = 0.9

    def bind_step(self, context: StepContext) -> TaughtStep:
        return TaughtStep(context, self.weight, self.decay)

    def ledger(self, at: OptimizerQuery) -> Ledger:
        teacher = Entry("optimizer", sum(p.bytes for p in at.parameters), what="teacher")
        return SGD.value(momentum=0.9).ledger(at) + Ledger.of(teacher)
