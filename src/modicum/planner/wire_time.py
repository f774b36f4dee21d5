"""How long an update's calls take on a measured link, and how much of that a step waits for.

A model of one link that carries one call at a time; between ranks of a host, where there are
several hosts, of another one. Gradients of replicas and of sharded optimizer state travel bucket by
bucket while the last micro-batch's backward pass runs, so the last bucket begins when that is over;
weights that come of them are waited for. Of FSDP2's calls on a CPU each travels while the block
before or after it computes, so a pass takes what is longer, its calls or its computing, and one
part of the other. What an optimizer sends in its update is waited for. What a CPU spends on moving
bytes is not there for computing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from modicum.core.contracts.ledger import Wire
from modicum.core.machine.links import LOCAL, NODE, MeasuredLink
from modicum.core.ranks.layout import REPLICATE, SHARD, Layout

FORWARD = 1 / 3  # of a pass's work; the backward pass has twice that
_SUMS = ("all_reduce", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class WireQuery:
    """An update, as its time on the wire is asked for.

    Args:
        wires: of its passes, and of the weights that come of them.
        layout: of the ranks.
        compute: seconds that an update takes where nothing travels.
        micro_batches: in an update.
        device: cpu or cuda.
        deferred: whether weights are gathered while the next forward pass runs.
        late: the part of the sums that begins when the backward pass is over.
        waits: of FSDP2's calls on a CPU, which are waited for where they are asked for.
        gathered: how often FSDP2 gathers a block in a micro-batch.
        on_a_host: how many ranks a host has; 0: all are on one.
        sums_once: whether FSDP2's sums are of the last micro-batch alone, not of each.
        updates: calls of the optimizer's update, which are not among `wires`.
    """

    wires: tuple[Wire, ...]
    layout: Layout
    compute: float
    micro_batches: int = 1
    device: str = "cpu"
    deferred: bool = False
    late: float = 0.0
    waits: Collection[Literal["gathers", "sums"]] = ()
    gathered: int = 2
    on_a_host: int = 0
    sums_once: bool = False
    updates: tuple[Wire, ...] = ()

    def among(self, axis: str) -> int:
        """How many ranks a call over an axis has."""
        ranks, here = self.layout.ranks, self.on_a_host or self.layout.ranks
        sizes = {SHARD: self.layout.shards, LOCAL: here, NODE: ranks // here}
        if self.layout.replicas > 1:  # else an exchange of matrices goes over all ranks
            sizes[REPLICATE] = self.layout.replicas
        return sizes.get(axis, ranks)

    def way(self, axis: str, link: MeasuredLink) -> MeasuredLink:
        """The link that calls over an axis go by, where `link` is the one between hosts."""
        shards, here = self.layout.shards, self.on_a_host
        inside = axis == LOCAL or (axis == SHARD and here and here % shards == 0)
        return link.within if inside and link.within is not None else link


@dataclass(frozen=True)
class WireTime:
    """Seconds of an update.

    Args:
        busy: for which its calls keep the link busy.
        waited: by which the step is longer than its computing, moving bytes included.
    """

    busy: float
    waited: float


@dataclass(frozen=True)
class _Calls:
    """Calls of an update: seconds for which they keep the link busy, and how many follow another.

    Of a sum that is made in several hops those of one count.
    """

    seconds: float = 0.0
    count: float = 0

    def __add__(self, other: _Calls) -> _Calls:
        return _Calls(self.seconds + other.seconds, self.count + other.count)

    def part(self, share: float) -> _Calls:
        """So much of them."""
        return _Calls(share * self.seconds, share * self.count)

    @classmethod
    def of(cls, wires: Iterable[Wire], at: WireQuery, link: MeasuredLink) -> _Calls:
        seconds, counts = 0.0, Counter[str]()
        for wire in wires:
            around = (at.among(wire.axis) - 1) * (2 if wire.collective == "all_reduce" else 1)
            seconds += at.way(wire.axis, link).seconds(wire.bytes, around * wire.count)
            counts[wire.axis] += wire.count
        return cls(seconds, max(counts.values(), default=0))


def wire_time(at: WireQuery, link: MeasuredLink) -> WireTime:
    """The time of an update's calls on a link.

    >>> wires = (Wire("all_reduce", 4_000_000, "replicate", 4),)
    >>> at = WireQuery(wires, Layout.of(2), compute=3.0)
    >>> wire_time(at, MeasuredLink(latency=0.0, rate=1e6))  # 4 s, of which 2 s of backward hide
    WireTime(busy=4.0, waited=2.0)
    >>> wire_time(at, MeasuredLink(latency=0.0, rate=1e7)).waited  # the last of four buckets
    0.1
    """
    sums, gathers = (
        [wire for wire in at.wires if (wire.collective in _SUMS) is of_sums]
        for of_sums in (True, False)
    )
    summing, gathering = (_Calls.of(wires, at, link) for wires in (sums, gathers))
    updating, moved = _Calls.of(at.updates, at, link).seconds, 0.0
    if at.device == "cpu":
        moved = sum(at.way(w.axis, link).cpu * w.bytes for w in (*at.wires, *at.updates))
    passing, once = summing.seconds + gathering.seconds, at.compute / at.micro_batches
    busy, after = passing + updating, updating + moved
    forward, backward = FORWARD * once, (1 - FORWARD) * once
    if at.layout.shards > 1 and not at.layout.copies:
        if at.device != "cpu":
            return WireTime(busy, max(0.0, passing - at.compute) + updating)
        return WireTime(busy, _of_blocks(at, gathering, summing) + after)
    early, late = (1 - at.late) * summing.seconds, at.late * summing.seconds
    last = early / max(1, summing.count * (1 - at.late))
    waited = max(last, early - backward) + late
    waited += max(0.0, gathering.seconds - forward) if at.deferred else gathering.seconds
    return WireTime(busy, waited + after)


def _of_blocks(at: WireQuery, gathers: _Calls, sums: _Calls) -> float:
    """Seconds by which FSDP2's calls on a CPU make an update longer."""
    around = _Calls() if "gathers" in at.waits else gathers
    early = _Calls() if "sums" in at.waits else _Calls((1 - at.late) * sums.seconds, sums.count)
    waited = gathers.seconds - around.seconds + sums.seconds - early.seconds
    times, last = at.micro_batches, 1 / at.micro_batches
    forward, backward = FORWARD * at.compute, (1 - FORWARD) * at.compute
    again = around.part(1 - 1 / at.gathered)
    waited += _longer(around.part(1 / at.gathered), forward, times)
    if not at.sums_once:
        return waited + _longer(again + early, backward, times)
    waited += _longer(again.part(1 - last), (1 - last) * backward, times - 1)
    return waited + _longer(again.part(last) + early, last * backward, 1)


def _longer(along: _Calls, compute: float, passes: int) -> float:
    """Seconds by which so many passes are longer for the calls that travel along with them."""
    pieces = max(1.0, along.count / max(1, passes))
    # All of what is longer, and one piece of the other, with which nothing goes along.
    return max(along.seconds / pieces, along.seconds + compute / pieces - compute)


def break_even(dense: WireQuery, other: WireQuery, link: MeasuredLink) -> float | None:
    """The rate (bytes a second) below which `other` has the faster step; None: at no rate.

    Both are asked at links of this one's latency and processor time. Infinite: at every rate.
    """

    def gains(rate: float) -> bool:
        at = replace(link, rate=rate)
        ours, theirs = (each.compute + wire_time(each, at).waited for each in (other, dense))
        return ours < theirs

    low, high = 1e3, 1e12
    if not gains(low):
        return None
    if gains(high):
        return math.inf
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gains(middle) else (low, middle)
    return float(f"{low:.4g}")
