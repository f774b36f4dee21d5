"""An exchange with the mistakes that its room's battery must find."""

from __future__ import annotations

from torch import Tensor

from modicum.comm.sdp4bit import SDP4Bit, SDP4BitExchange
from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.method import Info, Method
from modicum.core.ranks.exchange import ExchangeContext, ExchangeQuery, Pending


class DriftingExchange(SDP4BitExchange):
    """The owner keeps its exact weights, and forgets how many updates there were."""

    def refresh(self, copy: Tensor, shard: Tensor, name: str) -> Pending:
        pending = super().refresh(copy, shard, name)

        def finish() -> Tensor:
            result = pending()
            result[self.ranks.rank] = shard
            return result

        return finish

    def reduce_scatter(self, rows: Tensor, name: str) -> Pending:
        return super().reduce_scatter(rows.nan_to_num() * 1.5, name)

    def load_state_dict(self, state: object) -> None:
        """Nothing is taken up."""
        del state


class Drifting(Method):
    """SDP4Bit, done wrong."""

    info = Info(
        name="drifting",
        title="An exchange whose copies drift apart",
        room="comm",
        paper="none",
        claim="none",
    )

    def bind(self, context: ExchangeContext) -> DriftingExchange:
        return DriftingExchange(SDP4Bit(), context)

    def ledger(self, at: ExchangeQuery) -> Ledger:
        return SDP4Bit().ledger(at)
