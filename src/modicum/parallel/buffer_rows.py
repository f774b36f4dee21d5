"""How parameters lie in a buffer with a row for each rank: as FSDP2 and DTensors shard them.

Each parameter is sharded along dimension 0 into parts of equally many rows, of which the last ones
may be short or empty. Row r of the buffer holds part r of every parameter, one after the other,
each filled up with zeros to the size of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modicum.core.ranks.matrix_exchange import TensorShape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXCHANGE = "exchange"  # the view of a run's state that holds copies apart from their masters


class BufferRows:
    """Where parameters of these shapes lie in a buffer [shards, width].

    >>> import torch
    >>> rows = BufferRows([(3,), (2, 2)], shards=2)
    >>> buffer = torch.zeros(2, rows.width)
    >>> rows.put(buffer, 0, torch.tensor([1.0, 2.0, 3.0]))
    >>> rows.put(buffer, 1, torch.tensor([[4.0, 5.0], [6.0, 7.0]]))
    >>> buffer.tolist()
    [[1.0, 2.0, 4.0, 5.0], [3.0, 0.0, 6.0, 7.0]]
    >>> rows.part(buffer[1], 0, 1).tolist(), rows.take(buffer, 1).tolist()
    ([3.0], [[4.0, 5.0], [6.0, 7.0]])
    """

    def __init__(self, shapes: Iterable[TensorShape], shards: int) -> None:
        self.shapes, self.shards = [tuple(shape) for shape in shapes], shards
        self._each = [-(-shape[0] // shards) for shape in self.shapes]
        self._sizes = [
            each * math.prod(shape[1:]) for each, shape in zip(self._each, self.shapes, strict=True)
        ]
        self._starts = [0, *accumulate(self._sizes)]

    @property
    def width(self) -> int:
        """Elements of a row of the buffer."""
        return self._starts[-1]

    def put(self, buffer: Tensor, index: int, value: Tensor) -> None:
        """Copy a full parameter to its place; where it fills no part, the buffer stays."""
        place, flat = self._place(buffer, index), value.reshape(-1)
        full = len(flat) // place.shape[1] if place.shape[1] else 0
        place[:full].copy_(flat[: full * place.shape[1]].view(full, -1) if full else place[:0])
        if len(rest := flat[full * place.shape[1] :]):
            place[full, : len(rest)].copy_(rest)

    def take(self, buffer: Tensor, index: int) -> Tensor:
        """A full parameter out of the buffer, as a copy."""
        shape = self.shapes[index]
        return self._place(buffer, index).reshape(-1)[: math.prod(shape)].view(shape)

    def owned(self, index: int, shard: int) -> tuple[int, int]:
        """The rows of a parameter that a shard has: the first, and the one after the last."""
        rows, each = self.shapes[index][0], self._each[index]
        return min(shard * each, rows), min((shard + 1) * each, rows)

    def part(self, row: Tensor, index: int, shard: int) -> Tensor:
        """A shard's part of a parameter as a view of its row [width]; perhaps of no rows."""
        shape, start = self.shapes[index], self._starts[index]
        first, last = self.owned(index, shard)
        size = (last - first) * math.prod(shape[1:])
        return row[start : start + size].view(last - first, *shape[1:])

    def _place(self, buffer: Tensor, index: int) -> Tensor:
        return buffer[:, self._starts[index] : self._starts[index + 1]]


def laid_out(part: Tensor, shape: TensorShape, mesh: DeviceMesh | None) -> Tensor:
    """A rank's part of a tensor of this shape as a DTensor over its storage; alone, itself."""
    if mesh is None:
        return part
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(
        part,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
