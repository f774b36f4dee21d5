"""Gradients of FSDP2 that an exchange of the room `comm` sums as full matrices.

FSDP2 puts the full gradients of what it gathers at once into one buffer with a row for each rank,
and takes this rank's row of their sums. Here matrices are found in that buffer and handed to the
exchange, and the row is filled when all sums have landed, which is after the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.ranks.matrix_exchange import MatrixExchange, PendingSums, TensorShape
from modicum.parallel.buffer_rows import BufferRows
from modicum.parallel.fsdp_wires import Allocating


class MatrixGroup(Allocating):
    """What FSDP2 gathers at once, as the reduce-scatter that it calls for the gradients.

    Args:
        name: of the group, for messages.
        shapes: of its trained parameters by the model's names, in FSDP2's order.
        exchange: what sums their gradients.

    Attributes:
        last: whether the backward pass is the update's last one.
    """

    def __init__(
        self, name: str, shapes: Mapping[str, TensorShape], exchange: MatrixExchange
    ) -> None:
        self.name, self.exchange = name, exchange
        self._names, self._rows = list(shapes), BufferRows(shapes.values(), exchange.ranks.size)
        self.last = True
        self._sums: Tensor | None = None
        self._pending: PendingSums | None = None
        self._output: Tensor | None = None

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Begin to sum the gradients over the ranks; the output is filled by `land`.

        Before the update's last backward pass they are added up, and the output is zero.

        Raises:
            InputError: there are gradients of some parameters only.
        """
        buffer = input_tensor.view(self._rows.shards, -1)
        if buffer.shape[1] != self._rows.width:
            raise InputError(
                "on FSDP2 an exchange of matrices needs a gradient of every trained parameter, and "
                "this version of PyTorch leaves out those that have none; install PyTorch 2.12 or "
                "newer, or set parallel.strategy to zero",
                field="comm.method",
                value=self.name,
            )
        if self._sums is not None:
            buffer = self._sums.add_(buffer)
        if not self.last:
            self._sums = buffer
            output_tensor.zero_()
            return
        self._sums = None
        taken = {name: self._rows.take(buffer, index) for index, name in enumerate(self._names)}
        self._pending, self._output = self.exchange.begin(taken, taken), output_tensor

    def land(self) -> None:
        """Wait for the sums, of which this rank computes the rows that it owns."""
        if self._pending is None or self._output is None:
            return
        rank = self.exchange.ranks.rank
        for index, total in enumerate(self._pending.land().values()):
            assert total is not None, "every gradient was said to be there"
            first, last = self._rows.owned(index, rank)
            self._rows.part(self._output, index, rank).copy_(total.rows(first, last))
        self.clear()

    def clear(self) -> None:
        """Forget the update."""
        self._sums = self._pending = self._output = None
