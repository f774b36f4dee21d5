"""Exchanges of flat buffers that are what they say: asynchronous, in one order, and metered.

gloo's own reduce-scatter is an all-reduce inside and sends twice what it must. Here it is
an all-to-all and a sum in the order of the ranks: an element's sum depends on the ranks' values
alone, not on where in which buffer it stands. On NCCL it is NCCL's.

Calls are issued in the order in which they are asked for, in a process group of their own; so every
rank must ask for the same calls in the same order, and nothing that goes through another group can
come in between. One that has to wait for its turn begins when that comes, whatever the thread that
asked does meanwhile (`modicum.core.ranks.call_queue`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from modicum.core.ranks.call_queue import CallQueue, CollectiveHandle
from modicum.core.ranks.observed_calls import AGREEMENT, CallNote, named, observed
from modicum.core.ranks.pretended_link import Link, pretended
from modicum.core.ranks.ranks import Ranks, peer_errors
from modicum.core.ranks.row_sums import RowSum, sum_in_order
from modicum.core.torch_private import allocations_noted, call_timeout

# Newer versions of PyTorch warn of the older names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# What a call sends to each rank, and what comes from each, once the call has begun.
_Parts = Callable[[], tuple[Sequence[Tensor] | Tensor, Sequence[Tensor] | Tensor]]


@dataclass
class Meter:
    """Bytes that this rank puts on the wire, and calls, by collective."""

    bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, collective: str, sent: int) -> None:
        """Note a call in which this rank sends so many bytes."""
        self.bytes[collective] += sent
        self.calls[collective] += 1

    def clear(self) -> None:
        """Begin to count anew."""
        self.bytes.clear()
        self.calls.clear()


class Collectives:
    """Reduce-scatter, all-gather, all-to-all and all-reduce (sums, OR) of flat buffers among ranks.

    On gloo a reduce-scatter needs a second buffer as large as the first until it is done. So at
    most `in_flight` calls are under way at a time and the others wait for their turn. They get it
    from a thread of the engine's own, or where a profiler counts this thread's allocations, which
    knows nothing of other threads', when `progress` or `wait` is called.

    Each call takes a `label`: whose values travel, such as `layers.17`, for those who observe calls
    (`modicum.core.ranks.observed_calls`). Sums and gathers take a `priority`, alike on all ranks: a
    call has the link to itself, but for others of its priority and of smaller ones, and those of
    `batch` begin in that order.

    Args:
        ranks: this process among the others; alone, every call is the identity.
        group: whose ranks take part; by default all, in a group made for this (a collective call).
        link: a slower link to pretend; by default that of `pretending`.
        in_flight: calls that gloo has at a time.

    >>> alone = Collectives(Ranks())
    >>> shard = alone.reduce_scatter(torch.arange(3.0)).wait()
    >>> alone.all_gather(shard).wait().tolist(), alone.meter.bytes["all_gather"]
    ([0.0, 1.0, 2.0], 0)
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        group: dist.ProcessGroup | None = None,
        link: Link | None = None,
        in_flight: float = 2,
    ) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self.link, self.meter = link or pretended(), Meter()
        self._queue = CallQueue(self.link, in_flight, ranks.clock)
        if not ranks.alone:
            with peer_errors():
                self._group = dist.new_group(timeout=call_timeout()) if group is None else group
            self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._receipts, self._is_all = ranks.receipts, self.size == ranks.size
        self._numbers = [0] if ranks.alone else dist.get_process_group_ranks(self._group)

    def reduce_scatter(
        self, buffer: Tensor, *, label: str = "", priority: int = 0
    ) -> CollectiveHandle:
        """Sum `buffer` [W n] over the ranks; the result is this rank's part [n] of the sum.

        Half-precision values are added up in fp32 and rounded once (on NCCL, as NCCL does it). The
        buffer may be used again when the call is done. Alone, the result is the buffer itself.

        Raises:
            ValueError: the buffer has other than one dimension, or cannot be split into W parts.
        """
        self._check(buffer, parts=self.size)
        sent = buffer.nbytes - buffer.nbytes // self.size
        if self._native(buffer):
            shard = buffer.new_empty(buffer.numel() // self.size)
            return self._call(
                "reduce_scatter",
                buffer,
                label,
                sent,
                self.size - 1,
                lambda: _reduce_scatter(shard, buffer, group=self._group, async_op=True),
                lambda: shard,
                priority=priority,
            )
        rows, sums = list[Tensor](), list[RowSum]()

        def begin() -> dist.Work:
            received = torch.empty_like(buffer)
            rows.append(received.view(self.size, -1))
            sums.append(RowSum(rows[0]))
            return dist.all_to_all_single(
                _bytes(received), _bytes(buffer), group=self._group, async_op=True
            )

        return self._call(
            "reduce_scatter",
            buffer,
            label,
            sent,
            self.size - 1,
            begin,
            lambda: sums[0]() if sums else buffer,
            (lambda: sums[0].stretch()) if RowSum.suits(buffer) else None,
            priority=priority,
            parts=lambda: (buffer.view(self.size, -1), rows.pop()),
        )

    def all_to_all(
        self,
        buffer: Tensor,
        *,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        label: str = "",
    ) -> CollectiveHandle:
        """Every rank's part for this one: part r of `buffer` [W n] goes to rank r of the group.

        Parts may be of unequal sizes: then `buffer` has those that are sent, and the result those
        that are received, in the order of the ranks. Who does not know what it will receive asks
        first: `engine.all_to_all(torch.tensor(sent)).wait().tolist()`.

        Args:
            sent: elements of the part for each rank; by default equal parts.
            received: elements of the part from each rank; what it sends to this one.

        Raises:
            ValueError: the buffer has other than one dimension, or cannot be split so.

        >>> alone = Collectives(Ranks())
        >>> alone.all_to_all(torch.ones(3), sent=[3], received=[3]).wait()
        tensor([1., 1., 1.])
        """
        width = buffer.element_size()
        come: list[int] | None = None  # the bytes of unequal parts
        leave: list[int] | None = None
        if sent is None or received is None:
            if sent is not received:
                raise ValueError("parts of unequal sizes need both what is sent and what comes")
            self._check(buffer, parts=self.size)
            sent = received = [buffer.numel() // self.size] * self.size
        else:
            self._check(buffer)
            self._check_parts(buffer, sent, received)
            come, leave = [width * n for n in received], [width * n for n in sent]
        result = buffer if self.size == 1 else buffer.new_empty(sum(received))

        def begin() -> dist.Work:
            into, source = _bytes(result), _bytes(buffer)
            group = self._group
            return dist.all_to_all_single(into, source, come, leave, group=group, async_op=True)

        return self._call(
            "all_to_all",
            buffer,
            label,
            buffer.nbytes - width * sent[self.rank],
            self.size - 1,
            begin,
            lambda: result,
            parts=lambda: (buffer.split(list(sent)), result.split(list(received))),
        )

    def _check_parts(self, buffer: Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        """Whether these are parts of the buffer, one for each rank."""
        sizes = (*sent, *received)
        if len(sent) != self.size or len(received) != self.size or any(n < 0 for n in sizes):
            raise ValueError(f"a size for each of {self.size} ranks was expected")
        if sum(sent) != buffer.numel() or sent[self.rank] != received[self.rank]:
            raise ValueError(
                f"parts of {list(sent)} elements do not make up a buffer of {buffer.numel()}, or "
                f"rank {self.rank} receives another part of itself than it sends"
            )

    def all_gather(
        self, shard: Tensor, into: Tensor | None = None, *, label: str = "", priority: int = 0
    ) -> CollectiveHandle:
        """Every rank's `shard` [n], one after the other [W n], written to `into` where it is given.

        Raises:
            ValueError: a buffer has other than one dimension, or `into` another size.
        """
        self._check(shard)
        whole = shard.new_empty(self.size * shard.numel()) if into is None else into
        self._check(whole)
        if whole.numel() != self.size * shard.numel():
            raise ValueError(f"{self.size} shards of {shard.numel()} do not fill {whole.numel()}")
        if self.size == 1 and whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard)
        return self._call(
            "all_gather",
            shard,
            label,
            (self.size - 1) * shard.nbytes,
            self.size - 1,
            lambda: _gather(_bytes(whole), _bytes(shard), group=self._group, async_op=True),
            lambda: whole,
            priority=priority,
            parts=lambda: ([shard] * self.size, whole.view(self.size, -1)),
        )

    def all_reduce(self, buffer: Tensor, *, label: str = "", priority: int = 0) -> CollectiveHandle:
        """Sum `buffer` over the ranks, in place, in an order that is the library's own."""
        self._check(buffer)
        return self._call(
            "all_reduce",
            buffer,
            label,
            2 * (self.size - 1) * buffer.nbytes // self.size,
            2 * (self.size - 1),
            lambda: dist.all_reduce(buffer, group=self._group, async_op=True),
            lambda: buffer,
            priority=priority,
        )

    def all_or(self, buffer: Tensor, *, label: str = "") -> CollectiveHandle:
        """The bitwise OR of `buffer` over the ranks, in place; bools and integers of any size.

        NCCL has none: there every rank gathers all buffers, and makes it.

        Raises:
            ValueError: the buffer has other than one dimension, or numbers that are no integers.

        >>> Collectives(Ranks()).all_or(torch.tensor([1, 6])).wait().tolist()
        [1, 6]
        """
        self._check(buffer)
        if buffer.is_floating_point() or buffer.is_complex():
            raise ValueError(f"integers or bools were expected, not {buffer.dtype}")
        bits = _bytes(buffer)
        if self.size > 1 and buffer.is_cuda:
            rows = bits.new_empty(self.size * len(bits))

            def either() -> Tensor:
                for row in rows.view(self.size, -1):
                    bits.bitwise_or_(row)
                return buffer

            return self._call(
                "all_gather",
                buffer,
                label,
                (self.size - 1) * buffer.nbytes,
                self.size - 1,
                lambda: _gather(rows, bits, group=self._group, async_op=True),
                either,
            )
        return self._call(
            "all_reduce",
            buffer,
            label,
            2 * (self.size - 1) * buffer.nbytes // self.size,
            2 * (self.size - 1),
            lambda: dist.all_reduce(bits, dist.ReduceOp.BOR, group=self._group, async_op=True),
            lambda: buffer,
        )

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks of one element each, added in their order: the same on all."""
        return sum_in_order(
            self.all_gather(value.reshape(1), label=AGREEMENT).wait().view(-1, 1)
        ).reshape(())

    def batch(self) -> AbstractContextManager[None]:
        """Have the calls of the block begin at its end, those of small priorities first.

        >>> engine = Collectives(Ranks())
        >>> with engine.batch():
        ...     later = engine.all_reduce(torch.ones(2), priority=1)
        ...     first = engine.all_reduce(torch.ones(2))
        >>> first.wait().tolist()
        [1.0, 1.0]
        """
        return self._queue.batch()

    def progress(self) -> None:
        """End the calls that are done, and begin those that waited for their turn."""
        self._queue.progress()

    def _call(
        self,
        name: str,
        given: Tensor,
        label: str,
        sent: int,
        steps: int,
        begin: Callable[[], dist.Work],
        result: Callable[[], Tensor],
        stretch: Callable[[], bool] | None = None,
        *,
        priority: int = 0,
        parts: _Parts | None = None,
    ) -> CollectiveHandle:
        note = None
        if observed():
            note = CallNote(name.replace("_", "-"), label or named(), sent, time.monotonic())
        aside = not given.is_cuda and not allocations_noted()
        begin, arrived = self._with_receipt(given, begin, parts)
        handle = CollectiveHandle(
            self._queue, begin, result, sent, steps, note,
            arrived=arrived, stretch=stretch, aside=aside, priority=priority,
        )  # fmt: skip
        self.meter.add(name, sent)
        if self.size == 1:
            handle.value = result()
        else:
            self._queue.add(handle)
        return handle

    def _with_receipt(
        self, given: Tensor, begin: Callable[[], dist.Work], parts: _Parts | None
    ) -> tuple[Callable[[], dist.Work], Callable[[], None] | None]:
        """What begins a call and what is done when it has ended, with checksums where there are."""
        receipt = None if self.size == 1 or given.is_cuda else self._receipts.of_call()
        if receipt is None:
            return begin, None
        if parts is None:  # a sum that is made on its way
            return begin, lambda: receipt.made(given if self._is_all else None)
        came: list[tuple[int, Tensor]] = []

        def checked() -> dist.Work:
            work = begin()  # which travels meanwhile
            sent, received = parts()
            others = [n for n in range(self.size) if n != self.rank]
            receipt.sent([sent[n] for n in others])
            came.extend((self._numbers[n], received[n]) for n in others)
            return work

        return checked, lambda: receipt.came(came)

    def _native(self, buffer: Tensor) -> bool:
        """Whether the buffer travels by NCCL, which needs no second one and keeps its own queue."""
        native = self.size > 1 and buffer.is_cuda
        if native:
            self._queue.in_flight = inf
        return native

    def _check(self, buffer: Tensor, parts: int = 1) -> None:
        if buffer.ndim != 1 or not buffer.is_contiguous() or buffer.numel() % parts:
            raise ValueError(
                f"a flat buffer of {parts} equal parts was expected, not {tuple(buffer.shape)}"
            )


def _bytes(buffer: Tensor) -> Tensor:
    """The buffer as bytes, which every library moves, whatever they represent."""
    return buffer.view(torch.uint8)
