"""How long an update's calls take on a measured link, and how much of that a step waits for.

A model of one link that carries one call at a time; between ranks of a host, where there are
several hosts, of another one. Gradients of replicas and of sharded optimizer state travel bucket by
bucket while the last micro-batch's backward pass runs, so the last bucket begins when that is over;
weights that come of them are waited for. Of FSDP2's calls on a CPU each travels while the block
before or after it computes, so a pass takes what is longer, its calls or its computing, and one
part of the other. What a CPU spends on moving bytes is not there for computing.
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
        wires: of the ledger.
        layout: of the ranks.
        compute: seconds that an update takes where nothing travels.
        micro_batches: in an update.
        device: cpu or cuda.
        deferred: whether weights are gathered while the next forward pass runs.
        late: the part of the sums that begins when the backward pass is over.
        waits: of FSDP2's calls on a CPU, which are waited for where they are asked for.
        gathered: how often FSDP2 gathers a block in a micro-batch.
        on_a_host: how many ranks a host has; 0: all are on one.
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

    def among(self, axis: str) -> int:
        """How many ranks a call over an axis has."""
        ranks, here = self.layout.ranks, self.on_a_host or self.layout.ranks
        sizes = {SHARD: self.layout.shards, REPLICATE: self.layout.replicas}
        return (sizes | {LOCAL: here, NODE: ranks // here}).get(axis, ranks)

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
    moved = 0.0
    if at.device == "cpu":
        moved = sum(at.way(wire.axis, link).cpu * wire.bytes for wire in at.wires)
    busy, once = summing.seconds + gathering.seconds, at.compute / at.micro_batches
    forward, backward = FORWARD * once, (1 - FORWARD) * once
    if at.layout.shards > 1 and not at.layout.copies:
        if at.device != "cpu":
            return WireTime(busy, max(0.0, busy - at.compute))
        return WireTime(busy, _of_blocks(at, gathering, summing) + moved)
    early, late = (1 - at.late) * summing.seconds, at.late * summing.seconds
    last = early / max(1, summing.count * (1 - at.late))
    waited = max(last, early - backward) + late
    waited += max(0.0, gathering.seconds - forward) if at.deferred else gathering.seconds
    return WireTime(busy, waited + moved)


def _of_blocks(at: WireQuery, gathers: _Calls, sums: _Calls) -> float:
    """Seconds by which FSDP2's calls on a CPU make an update longer."""
    around = _Calls() if "gathers" in at.waits else gathers
    early = _Calls() if "sums" in at.waits else _Calls((1 - at.late) * sums.seconds, sums.count)
    waited = gathers.seconds - around.seconds + sums.seconds - early.seconds
    ahead = _Calls(around.seconds / at.gathered, around.count / at.gathered)
    again = _Calls(around.seconds - ahead.seconds, around.count - ahead.count)
    backward = _Calls(again.seconds + early.seconds, again.count + early.count)
    for part, along in ((FORWARD, ahead), (1 - FORWARD, backward)):
        pieces, compute = max(1.0, along.count / at.micro_batches), part * at.compute
        # All of what is longer, and one piece of the other, with which nothing goes along.
        waited += max(along.seconds / pieces, along.seconds + compute / pieces - compute)
    return waited


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
