"""Buckets whose gradients are summed as full matrices, by an exchange of the room `comm`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from modicum.core.ranks.exchange import ShardExchange
from modicum.core.ranks.matrix_exchange import (
    GradientSum,
    MatrixExchange,
    PendingSums,
    gradient_or_zeros,
)
from modicum.parallel.bucketed import Bucket
from modicum.parallel.masters import MasterBucket

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MatrixBucket(Bucket):
    """Parameters whose gradients an exchange sums; each has its sum when the bucket has landed.

    Args:
        named: the parameters by the model's names.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], exchange: MatrixExchange) -> None:
        super().__init__(list(named.values()))
        self._sender = _Sender(list(named), exchange)

    def _put(self, index: int) -> None:
        """It stays where it is until the bucket is sent."""

    def launch(self) -> None:
        """Begin to sum over the ranks; from here on no parameter has a gradient of this rank's."""
        self._sender.send(self.parameters, self._filled)

    def land(self) -> None:
        """Wait for the sums: every parameter that any rank used has its gradient."""
        for parameter, total in zip(self.parameters, self._sender.land(), strict=True):
            parameter.grad = None if total is None else total.full().to(parameter.dtype)
        self.clear()

    def clear(self) -> None:
        """Forget the update."""
        super().clear()
        self._sender.clear()


class MatrixMasterBucket(MasterBucket):
    """Masters of which each rank rebuilds the gradient's rows that it owns, and no others.

    Args:
        names: of the parameters, in the model.
        matrices: what sums gradients; `exchange` brings copies to their masters.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[nn.Parameter],
        exchange: ShardExchange,
        mesh: DeviceMesh | None,
        names: Sequence[str],
        matrices: MatrixExchange,
    ) -> None:
        self._sender = _Sender(names, matrices)
        super().__init__(name, parameters, exchange, mesh)

    def _put(self, index: int) -> None:
        """It stays where it is until the bucket is sent."""

    def launch(self) -> None:
        """Begin to sum over the ranks; from here on no parameter has a gradient of this rank's."""
        self._sender.send(self.parameters, self._filled)

    def land(self) -> None:
        """Wait for the sums: each master that any rank used has its rows of them."""
        for index, total in enumerate(self._sender.land()):
            if total is not None:
                first, last = self.rows.owned(index, self.rank)
                self.masters[index].grad = self.laid_out(total.rows(first, last), index)
        self.clear()

    def clear(self) -> None:
        """Forget the update."""
        super().clear()
        self._sender.clear()


class _Sender:
    """Gradients of some parameters, on their way through an exchange."""

    def __init__(self, names: Sequence[str], exchange: MatrixExchange) -> None:
        self._names, self._exchange = list(names), exchange
        self._pending: PendingSums | None = None

    def send(self, parameters: Sequence[nn.Parameter], filled: set[int]) -> None:
        gradients = {
            name: gradient_or_zeros(parameter)
            for name, parameter in zip(self._names, parameters, strict=True)
        }
        used = {self._names[index] for index in filled}
        self._pending = self._exchange.begin(gradients, used)
        for parameter in parameters:
            parameter.grad = None

    def land(self) -> list[GradientSum | None]:
        assert self._pending is not None
        sums = self._pending.land()
        return [sums[name] for name in self._names]

    def clear(self) -> None:
        self._pending = None
