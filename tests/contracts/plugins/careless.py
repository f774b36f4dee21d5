"""An exchange of matrices with the mistakes that its room's battery must find."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from modicum.comm.acp_sgd import ACPSGDExchange
from modicum.comm.low_rank import LowRankMethod
from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.method import Info
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.matrix_exchange import GradientSum, MatrixQuery


class CarelessExchange(ACPSGDExchange):
    """Owes before the update is made, hides what is not finite, draws factors rank by rank."""

    def send(self, name: str, matrix: Tensor) -> Tensor:
        return super().send(name, matrix.nan_to_num_())

    def rebuild(self, name: str, total: Tensor, second: Tensor | None) -> GradientSum:
        found = super().rebuild(name, total, second)
        self._errors[name] = self.staged(name)[0]
        return found

    def factors(self, name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
        if name not in self._factors:
            p, q = super().factors(name, matrix)
            generator = torch.Generator().manual_seed(self.ranks.rank)
            self._factors[name] = p, torch.randn(q.shape, generator=generator)
        return self._factors[name]

    def owe(self, state: Any) -> None:
        """Nothing is taken up."""


class Careless(LowRankMethod):
    """ACP-SGD, done wrong."""

    info = Info(
        name="careless",
        title="An exchange that forgets what it owes",
        room="comm",
        paper="none",
        claim="none",
    )
    halves: ClassVar[int] = 1

    def bind(self, context: ExchangeContext) -> CarelessExchange:
        return CarelessExchange(self, context)

    def ledger(self, at: MatrixQuery) -> Ledger:
        said = super().ledger(at)
        return Ledger(said.entries, said.work)
