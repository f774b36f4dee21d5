"""What sharded data parallelism sends: gradients to their owners, weights back to everybody.

A `ShardExchange` knows flat buffers, ranks and wires, and nothing of models. A buffer has a row for
each rank; a rank owns the row of its number. The base class sends numbers as they are; a method of
the room `comm` binds to a context and gives one that sends fewer bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor

from modicum.core.codecs.elements import ElementCodec, Stream
from modicum.core.contracts.ledger import Entry, Ledger, Wire
from modicum.core.contracts.method import Method
from modicum.core.errors import InputError
from modicum.core.ranks.agreement import same_terms
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.layout import REPLICATE, Layout
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks, peer_errors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Pending = Callable[[], Tensor]
SHARD, LOCAL, NODE = "shard", "local", "node"
_FP32 = 4


@dataclass(frozen=True)
class Nodes:
    """Ranks on hosts: rank r is number r % local of host r // local.

    Args:
        count: how many hosts.
        local: ranks on each.

    >>> Nodes.of(8, 4), Nodes.of(4, 4).hops(), Nodes(4, 1).hops(), Nodes(2, 2).hops()
    (Nodes(count=2, local=4), ('local',), ('node',), ('local', 'node'))
    """

    count: int = 1
    local: int = 1

    @classmethod
    def of(cls, ranks: int, local: int) -> Nodes:
        """So many ranks, `local` of them on each host; all, where there are fewer.

        Raises:
            InputError: hosts would not have equally many.
        """
        local = min(local, ranks)
        if ranks % local:
            raise InputError(
                f"{ranks} ranks cannot be split into hosts of equally many",
                field="comm.ranks_per_node",
                value=local,
                allowed=", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0),
            )
        return cls(ranks // local, local)

    def hops(self) -> tuple[str, ...]:
        """The axes along which there is somebody to exchange with, inside a host first."""
        sizes = {LOCAL: self.local, NODE: self.count}
        return tuple(axis for axis, size in sizes.items() if size > 1)


@dataclass(frozen=True)
class ExchangeContext:
    """What a method is bound to.

    Args:
        ranks: this process among the others, all of which hold shards.
        seed: of the run.
        device_type: where the buffers are.
        links: slower links to pretend, by axis, for experiments.
        hybrid: how ranks share weights, where those of a host hold parts of them and gradients of
            a part are summed over the hosts; None: gradients are summed over all ranks at once.
    """

    ranks: Ranks = field(default_factory=Ranks)
    seed: int = 0
    device_type: str = "cpu"
    links: Mapping[str, Link] = field(default_factory=dict)
    hybrid: Layout | None = None

    @property
    def peers(self) -> int:
        """How many ranks sum a gradient."""
        return self.ranks.size if self.hybrid is None else self.hybrid.replicas

    def group(self) -> dist.ProcessGroup | None:
        """A new group of these ranks; None: they are all. All ranks call this."""
        if self.hybrid is None or self.ranks.alone:
            return None
        return self.hybrid.mesh(self.device_type).get_group(REPLICATE)


class Exchange(Protocol):
    """What exchanges of both kinds have."""

    value: Method | None
    context: ExchangeContext


def terms_of(exchange: Exchange) -> dict[str, Any]:
    """What all ranks must have alike: the kind of exchange, its method's fields, the seed."""
    fields = {} if exchange.value is None else exchange.value.model_dump(mode="json")
    return {"kind": type(exchange).__name__, "seed": exchange.context.seed, **fields}


@dataclass(frozen=True)
class ExchangeQuery:
    """What an exchange's ledger is asked at.

    Args:
        rows: elements of a rank's row, buffer by buffer.
        ranks, ranks_per_node: how many there are, and on a host as the environment tells.
        copy_bytes: bytes an element of the weights that the model computes with.
        reductions: how often an update sums gradients over the ranks.
        gathers: whether weights travel by the exchange, too.
        later: bytes of the phase `step` that are not yet there while the last gradients are sent,
            less those that only are there then.
    """

    rows: tuple[int, ...]
    ranks: int
    ranks_per_node: int
    copy_bytes: int = 4
    reductions: int = 1
    gathers: bool = True
    later: int = 0

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """Elements of each buffer and of the one before it, which is there until its sum is.

        >>> ExchangeQuery((3, 5, 2), 2, 2).neighbours
        [(6, 0), (10, 6), (4, 10)]
        """
        sizes = [self.ranks * row for row in self.rows]
        return list(zip(sizes, [0, *sizes], strict=False))

    @property
    def weights(self) -> int:
        """Bytes of the two buffers of weights that are on their way at a time, at most."""
        return self.copy_bytes * max((sum(each) for each in self.neighbours), default=0)

    def sending(self, sent: int, kept: int, what: str) -> Entry:
        """Scratch of the phase `backward`, next to the largest buffer of gradients.

        A buffer leaves when it is full, and the one before it has landed soon after. The last one
        leaves when the backward pass is over: `last_sent`.

        Args:
            sent: bytes an element that sending takes.
            kept: bytes an element of the gradients, where they stay until their sum is there.
        """
        most, gradients = 0, max((_FP32 * own for own, _ in self.neighbours), default=0)
        for number, (own, before) in enumerate(self.neighbours, 1):
            leaving = sent * own if number < len(self.rows) else 0
            most = max(most, _FP32 * own + leaving + (sent + kept) * before)
        return self.in_buffers(Entry("workspace", most - gradients, ("backward",), what), sent)

    def last_sent(self, sent: int, kept: int) -> int:
        """Bytes that sending the last gradients takes, the buffer before them included."""
        if not self.rows or not self.reductions:
            return 0
        own, before = self.neighbours[-1]
        return sent * own + (sent + kept) * before

    def stepping(self, sending: int, spreading: int, what: str) -> Entry:
        """Scratch of the phase `step`: first the last gradients are sent, then weights.

        The last gradients are complete when the backward pass is over, and activations are gone.
        """
        return Entry("workspace", max(sending - self.later, spreading), ("step",), what)

    def in_buffers(self, entry: Entry, element_bytes: int) -> Entry:
        """The same, known to be buffers of so many bytes an element."""
        return entry.in_tensors(element_bytes * own for own, _ in self.neighbours)


class ShardExchange:
    """Sums of gradient rows to their owners and weights to all, sent as the numbers they are.

    Calls return at once and are on the wire; the function that they return waits. All ranks make
    the same calls in the same order. Alone, everything is the identity.

    Args:
        context: ranks, seed, device, links.
        nodes: which ranks are on one host; by default as the environment says.

    >>> import torch
    >>> exchange, copy = ShardExchange(), torch.zeros(1, 3)
    >>> exchange.reduce_scatter(torch.ones(1, 3), "layer")()
    tensor([1., 1., 1.])
    >>> exchange.refresh(copy, torch.full((3,), 2.0), "layer")()
    tensor([[2., 2., 2.]])
    """

    # Whether copies depend on what they were before, so that they are state of their own.
    incremental = False
    # Whether what is sent next depends on what was sent before: then a checkpoint keeps its state.
    stateful = False
    # Whether FSDP2 still gathers weights itself, and only sums of gradients travel by this.
    leaves_weights = False
    # The value that it was bound from, which all ranks must have alike.
    value: Method | None = None

    def __init__(self, context: ExchangeContext | None = None, nodes: Nodes | None = None) -> None:
        self.context = context or ExchangeContext()
        self.ranks = self.context.ranks
        self._nodes = nodes
        self.axes: tuple[str, ...] = (SHARD,)
        self.step = 0
        self._wires: dict[str, Collectives] = {}
        self._mesh: DeviceMesh | None = None

    @property
    def nodes(self) -> Nodes:
        """Which ranks are on one host; who has no hops never asks.

        Raises:
            InputError: as `Nodes.of`.
        """
        if self._nodes is None:
            self._nodes = Nodes.of(self.ranks.size, self.ranks.local_size)
        return self._nodes

    def connect(self) -> None:
        """Make the process groups now, which else the first calls do; all ranks call this."""
        for axis in self.axes:
            self.wire(axis)

    def reduce_scatter(self, rows: Tensor, name: str) -> Pending:
        """Sum rows [W, n], fp32, over the ranks; the result is the sum of this rank's row [n].

        Args:
            name: of the buffer, distinct from all others of the same update. The buffer may be
                used again when the result is there.
        """
        return self.wire(SHARD).reduce_scatter(rows.view(-1)).wait

    def refresh(self, copy: Tensor, shard: Tensor, name: str) -> Pending:
        """Bring every rank's copy [W, n], in place, to the owners' new weights.

        Args:
            copy: the weights that the model computes with, alike on all ranks, in its dtype.
            shard: this rank's row [n] of the weights that are trained, fp32.
            name: of the buffer.
        """
        return self.spread(copy, shard)

    def spread(self, copy: Tensor, shard: Tensor) -> Pending:
        """Make every rank's copy [W, n] the owners' weights, rounded to its dtype and no more."""
        own = shard.to(copy.dtype)
        handle = self.wire(SHARD).all_gather(own, into=copy.view(-1))

        def finish() -> Tensor:
            handle.wait()
            return copy

        return finish

    def advance(self) -> None:
        """An update is done: what is rounded at random from here on is rounded anew."""
        self.step += 1

    def stream(self, name: str) -> Stream:
        """The random draws of this rank for one encoding of the present update."""
        name = f"exchange/{name}/{self.ranks.rank}"
        return Stream(self.context.seed, self.step, name)

    def wire(self, axis: str) -> Collectives:
        """The collectives along an axis: all ranks, those of this host, or its like on each host.

        What is first asked for makes process groups, so all ranks ask alike.

        Raises:
            InputError: another rank has another exchange, or its method other fields, or knows
                another number of hosts where these count.
        """
        if axis not in self._wires:
            if not self._wires:
                terms = terms_of(self)
                if self.axes != (SHARD,):
                    terms["nodes"] = [self.nodes.count, self.nodes.local]
                same_terms(self.ranks, "exchange", terms)
            link = self.context.links.get(axis)
            self._wires[axis] = Collectives(self.ranks, group=self._group(axis), link=link)
        return self._wires[axis]

    def _group(self, axis: str) -> dist.ProcessGroup | None:
        if axis == SHARD or self.ranks.alone:
            return None  # all ranks
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            sizes, names = (self.nodes.count, self.nodes.local), (NODE, LOCAL)
            with peer_errors():
                self._mesh = init_device_mesh(self.context.device_type, sizes, mesh_dim_names=names)
        return self._mesh.get_group(axis)

    def sent(self) -> Counter[tuple[str, str]]:
        """Bytes that this rank has put on the wire, by collective and axis."""
        return Counter(
            {
                (collective, axis): count
                for axis, wire in self._wires.items()
                for collective, count in wire.meter.bytes.items()
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of updates; copies of the weights belong to whoever holds them."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the number of updates up."""
        self.step = int(state["step"])

    @staticmethod
    def ledger(at: ExchangeQuery) -> Ledger:
        """Bytes that a rank sends in an update when numbers are sent as they are, and its buffers.

        Sums are received into another buffer than the one that they are sent from; gloo has one of
        its own for what it gathers.
        """
        others, elements, calls = at.ranks - 1, sum(at.rows), len(at.rows)
        reduced = 4 * at.reductions * others * elements
        sums = Wire("reduce_scatter", reduced, SHARD, at.reductions * calls)
        if not at.gathers:  # into what FSDP2 has for them
            return Ledger.of(sums)
        last = at.last_sent(_FP32, _FP32)
        wait = at.stepping(last, at.weights, "gradients or weights on the wire")
        return Ledger.of(
            at.sending(_FP32, _FP32, "gradients on the wire"),
            at.in_buffers(wait, at.copy_bytes),
            sums,
            Wire("all_gather", at.copy_bytes * others * elements, SHARD, calls),
        )

    def close(self) -> None:
        """Forget the wires; process groups end with the default group."""
        self._wires.clear()
        self._mesh = None


def coded_sum(wire: Collectives, rows: Tensor, code: ElementCodec, stream: Stream) -> Pending:
    """Send each of the peers its share of the rows [k, n], coded; the sum [k / W, n] of one's own.

    The first peer's rows come first. Sums are fp32, in the order of the peers.
    """
    count, width = rows.shape
    handle = wire.all_to_all(code.encode(rows, stream).view(-1))

    def finish() -> Tensor:
        messages = handle.wait().view(wire.size, count // wire.size, -1)
        total = code.decode(messages[0], width)
        for message in messages[1:]:
            total = total + code.decode(message, width)
        return total

    return finish
