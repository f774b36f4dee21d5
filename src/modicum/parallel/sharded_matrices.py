"""Gradients of FSDP2 that an exchange of the room `comm` sums as full matrices.

FSDP2 puts the full gradients of what it gathers at once into one buffer with a row for each rank,
and takes this rank's row of their sums. Here matrices are found in that buffer and handed to the
exchange, and the row is filled when all sums have landed, which is after the backward pass.

On hybrid sharding the ranks of a host sum their gradients as they are, and the exchange sums rows
of matrices over the hosts, between which the link is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange, TensorShape
from modicum.core.ranks.pending_sums import PendingSums
from modicum.core.ranks.sharding import laid_like, own_part
from modicum.parallel.buffer_rows import BufferRows
from modicum.parallel.fsdp_wires import Engines, OrdinaryBuffers


class MatrixGroup(OrdinaryBuffers):
    """What FSDP2 gathers at once, as the reduce-scatter that it calls for the gradients.

    Args:
        name: of the group, for messages.
        shapes: of its trained parameters by the model's names, in FSDP2's order.
        exchange: what sums their gradients.
        lay: lays aside what these have as gradients.
        add: adds it to the sums that have landed.

    Attributes:
        last: whether the backward pass is the update's last one.
    """

    def __init__(
        self,
        name: str,
        shapes: Mapping[str, TensorShape],
        exchange: MatrixExchange,
        lay: Callable[[], None],
        add: Callable[[], None],
    ) -> None:
        self.name, self.exchange, self._lay, self._add = name, exchange, lay, add
        self._names, self._rows = list(shapes), BufferRows(shapes.values(), exchange.ranks.size)
        self.last = True
        self._sums: Tensor | None = None
        self._pending: PendingSums | None = None
        self._output: Tensor | None = None

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Begin to sum the gradients over the ranks; the output is filled by `land`.

        Before the update's last backward pass they are added up, and the output is zero.

        Raises:
            InputError: there are gradients of some parameters only; or a block ran twice in the
                forward pass, so that its gradients come in parts.
        """
        _check_width(self.name, input_tensor.numel(), self._rows)
        if self._pending is not None:
            raise InputError(
                "on FSDP2 an exchange of matrices needs all gradients of a block at once, and this "
                "block runs more than once in a forward pass; set parallel.strategy to zero",
                field="comm.method",
                value=self.name,
            )
        buffer = input_tensor.view(self._rows.shards, -1)
        if self._sums is not None:
            buffer = self._sums.add_(buffer)
        if not self.last:
            self._sums = buffer
            output_tensor.zero_()
            return
        self._sums = None
        taken = {name: self._rows.take(buffer, index) for index, name in enumerate(self._names)}
        self._lay()
        self._pending, self._output = self.exchange.begin(taken, taken), output_tensor

    def before(self, *, last: bool) -> None:
        """A backward pass follows, the update's last one or not; none is waited for any more."""
        self.last, self._pending = last, None

    def land(self) -> None:
        """Wait for the sums, of which this rank computes the rows that it owns."""
        if self._pending is None or self._output is None:
            return
        rank = self.exchange.ranks.rank
        for index, total in enumerate(self._pending.land().values()):
            assert total is not None, "every gradient was said to be there"
            first, last = self._rows.owned(index, rank)
            self._rows.part(self._output, index, rank).copy_(total.rows(first, last))
        self._add()
        self.clear()

    def clear(self) -> None:
        """Forget the update."""
        self._sums = self._pending = self._output = None


class HostsGroup(OrdinaryBuffers):
    """The same where the ranks of a host share weights, and hosts have all of them.

    What is added up over micro-batches are the gradients of a rank's rows, as FSDP2 has them.

    Args:
        name: of the group, for messages.
        shapes: of its trained parameters by the model's names, in FSDP2's order.
        exchange: what sums gradients of rows over the hosts.
        engines: what sums gradients within a host.

    Attributes:
        last: whether the backward pass is the update's last one.
        parameters: the sharded ones, in the order of the shapes; set when they have memory.
    """

    def __init__(
        self,
        name: str,
        shapes: Mapping[str, TensorShape],
        exchange: MatrixExchange,
        engines: Engines,
        layout: Layout,
    ) -> None:
        self.name, self.exchange, self._engines = name, exchange, engines
        self.names, self._rows = list(shapes), BufferRows(shapes.values(), layout.shards)
        self._shard = exchange.ranks.rank % layout.shards
        self.last = True
        self.parameters: list[nn.Parameter] = []
        self._pending: PendingSums | None = None
        for index, own in enumerate(self.names):
            first, end = self._rows.owned(index, self._shard)
            if end > first:
                exchange.rows[own] = first, end, self._rows.shapes[index][0]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **_: Any) -> None:
        """Sum within the host; in the last backward pass, begin to sum over the hosts.

        Raises:
            InputError: there are gradients of some parameters only.
        """
        _check_width(self.name, input_tensor.numel(), self._rows)
        engine = self._engines(group)
        summed = engine.reduce_scatter(input_tensor.view(-1), label=self.name).wait()
        for index, parameter in enumerate(self.parameters):
            part = self._rows.part(summed, index, self._shard)
            if parameter.grad is None:
                parameter.grad = laid_like(part, cast(Any, parameter))
            else:
                own_part(parameter.grad)[0].add_(part)
        if self.last:
            own = {
                name: own_part(cast(Tensor, parameter.grad))[0]
                for name, parameter in zip(self.names, self.parameters, strict=True)
                if name in self.exchange.rows
            }
            if own:
                self._pending = self.exchange.begin(own, own)

    def before(self, *, last: bool) -> None:
        """A backward pass follows, the update's last one or not; none is waited for any more."""
        self.last, self._pending = last, None

    def land(self) -> None:
        """Wait for the sums over the hosts."""
        if self._pending is None:
            return
        sums = self._pending.land()
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if (total := sums.get(name)) is not None:
                own_part(cast(Tensor, parameter.grad))[0].copy_(total.full())
        self.clear()

    def clear(self) -> None:
        """Forget the update."""
        self._pending = None


def _check_width(name: str, elements: int, rows: BufferRows) -> None:
    if elements != rows.shards * rows.width:
        raise InputError(
            "on FSDP2 an exchange of matrices needs a gradient of every trained parameter, and "
            "this version of PyTorch leaves out those that have none; install PyTorch 2.12 or "
            "newer, or set parallel.strategy to zero",
            field="comm.method",
            value=name,
        )
