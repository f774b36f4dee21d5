"""Parameters that travel together where masters are sharded: copies, gradients, masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.contracts.parameters import describe_parameter, metadata
from modicum.core.ranks.bucketed import Bucket
from modicum.core.ranks.exchange import Pending, ShardExchange
from modicum.core.ranks.observed_calls import AGREEMENT, naming
from modicum.core.ranks.ranks import peer_errors
from modicum.parallel.buffer_rows import BufferRows, laid_out

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MasterBucket(Bucket):
    """Parameters of one dtype that travel together: their copies, and this rank's masters.

    Args:
        parameters: of the model.
        mesh: over which masters are sharded; None where there is one rank.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[nn.Parameter],
        exchange: ShardExchange,
        mesh: DeviceMesh | None,
    ) -> None:
        super().__init__(parameters)
        self.name, self._exchange = name, exchange
        self.label = name  # whose calls these are, for who observes them
        self.rows = BufferRows((tuple(p.shape) for p in parameters), exchange.ranks.size)
        self._mesh, self.rank = mesh, exchange.ranks.rank
        # The masters are views of one row, which travels as it is.
        self._shard = self._copies(torch.float32)[self.rank].clone()
        self.trained = self.masters = [self._master(index) for index in range(len(parameters))]
        self._gradients: Tensor | None = None
        self._sum: Pending | None = None
        self._used: tuple[Tensor, dist.Work | None] | None = None

    # Gradients

    def took(self, index: int) -> bool:
        return self._gradients is not None and index in self._filled

    def _put(self, index: int) -> None:
        parameter = self.parameters[index]
        assert parameter.grad is not None
        if self._gradients is None:
            self._gradients = self._zeros(torch.float32)
        self.rows.put(self._gradients, index, parameter.grad)
        parameter.grad = None

    def launch(self) -> None:
        """Begin to sum over the ranks, and to ask who was used by any."""
        device = self._shard.device
        used = torch.zeros(len(self.parameters), dtype=torch.int32, device=device)
        used[sorted(self._filled)] = 1
        work = None
        if not self._exchange.ranks.alone:
            with peer_errors(), naming(AGREEMENT):
                work = dist.all_reduce(used, async_op=True)
        self._used = used, work
        gradients = self._zeros(torch.float32) if self._gradients is None else self._gradients
        self._gradients = None  # the exchange keeps it as long as it needs it
        with naming(self.label):
            self._sum = self._exchange.reduce_scatter(gradients, self.name)

    def land(self) -> None:
        """Wait for the sum: each master that any rank used has its gradient."""
        assert self._sum is not None
        assert self._used is not None
        row, (used, work) = self._sum(), self._used
        if work is not None:
            with peer_errors():
                work.wait()
        for index, master in enumerate(self.masters):
            # Who has a gradient need not ask, which on an accelerator would wait for it.
            if index in self._filled or int(used[index]):
                master.grad = self._part(row, index)
        self.clear()

    def clear(self) -> None:
        """Forget the update."""
        super().clear()
        self._gradients = self._sum = self._used = None

    # Weights

    def refresh(self, *, exactly: bool) -> Pending:
        """Begin to bring the copies to the masters; `exactly`: whatever they were before."""
        exchange = self._exchange
        dtype = self.parameters[0].dtype
        if exactly or not exchange.incremental:
            copies = torch.empty(
                (self.rows.shards, self.rows.width), dtype=dtype, device=self._shard.device
            )
        else:
            copies = self._copies(dtype)
        with naming(self.label):
            if exactly:
                return exchange.spread(copies, self._shard)
            return exchange.refresh(copies, self._shard, self.name)

    def store(self, pending: Pending) -> None:
        """Put what `refresh` brings into the model."""
        copies = pending()
        for index, parameter in enumerate(self.parameters):
            parameter.copy_(self.rows.take(copies, index))

    def _copies(self, dtype: torch.dtype) -> Tensor:
        copies = self._zeros(dtype)
        for index, parameter in enumerate(self.parameters):
            self.rows.put(copies, index, parameter)
        return copies

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        size = (self.rows.shards, self.rows.width)
        return torch.zeros(size, dtype=dtype, device=self.parameters[0].device)

    def _master(self, index: int) -> nn.Parameter:
        master = nn.Parameter(self._part(self._shard, index))
        return describe_parameter(master, metadata(self.parameters[index]))

    def _part(self, row: Tensor, index: int) -> Tensor:
        """A parameter's part of this rank's row, which it shares, sharded as the full one is."""
        return self.laid_out(self.rows.part(row, index, self.rank), index)

    def laid_out(self, part: Tensor, index: int) -> Tensor:
        """This rank's rows of a parameter as the master of it is."""
        return laid_out(part, self.rows.shapes[index], self._mesh)
