"""Masters whose gradients are summed as full matrices, by an exchange of the room `comm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from modicum.core.ranks.exchange import ShardExchange
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.matrix_replicas import GradientSender
from modicum.parallel.masters import MasterBucket

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        self._sender = GradientSender(names, matrices)
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
