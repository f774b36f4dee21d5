"""A schedule in one file that is wrong in four ways: the battery must say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from modicum.comm.base import ScheduleQuery
from modicum.comm.dear import DeAR
from modicum.comm.deferred import Deferred
from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.method import Info


class HastyStrategy(Deferred):
    """It never makes the last update, forgets learning rates, and updates what is not finite."""

    def flush(self) -> None:
        if self._begun or not self._due:
            super().flush()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        super().update(optimizer)
        self._settings = self._stepper.optimizer.param_groups

    def discard(self) -> None:
        self.update(self._stepper.optimizer)


class Hasty(DeAR):
    """A schedule that is wrong in four ways."""

    info = Info(
        name="hasty",
        title="a schedule that loses updates",
        room="comm",
        paper="none",
        claim="faster than anything",
        traits=("defers_update",),
    )

    def strategy(self, *arguments: Any, reduction: str = "sum", link: Any = None) -> HastyStrategy:
        mean = reduction == "mean"
        return HastyStrategy(*arguments, bucket_bytes=self.bucket_bytes, mean=mean, link=link)

    def ledger(self, at: ScheduleQuery) -> Ledger:
        """Half of what is sent."""
        said = super().ledger(at)
        return replace(said, wire=said.wire[:1])
