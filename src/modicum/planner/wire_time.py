"""How long an update's calls take on a measured link, and how much of that a step waits for.

A model of one link that carries one call at a time. Gradients of replicas and of sharded optimizer
state travel bucket by bucket while the last micro-batch's backward pass runs, so the last bucket
begins when that is over; weights that come of them are waited for. FSDP2 on a CPU waits for each
call where it asks for it. What a CPU spends on moving bytes is not there for computing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from modicum.core.contracts.ledger import Wire
from modicum.core.machine.links import MeasuredLink
from modicum.core.ranks.layout import Layout

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
    """

    wires: tuple[Wire, ...]
    layout: Layout
    compute: float
    micro_batches: int = 1
    device: str = "cpu"
    deferred: bool = False
    late: float = 0.0


@dataclass(frozen=True)
class WireTime:
    """Seconds of an update.

    Args:
        busy: for which its calls keep the link busy.
        waited: by which the step is longer than its computing, moving bytes included.
    """

    busy: float
    waited: float


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
    summing, gathering = _busy(sums, at, link), _busy(gathers, at, link)
    moved = 0.0
    if at.device == "cpu":
        moved = link.cpu * sum(wire.bytes for wire in at.wires)
    busy, once = summing + gathering, at.compute / at.micro_batches
    forward, backward = FORWARD * once, (1 - FORWARD) * once
    if at.layout.shards > 1 and not at.layout.copies:
        hidden = 0.0 if at.device == "cpu" else at.compute
        return WireTime(busy, max(0.0, busy - hidden) + moved)
    calls = sum(wire.count for wire in sums)
    early = (1 - at.late) * summing
    last = early / max(1, calls * (1 - at.late))
    waited = max(last, early - backward) + at.late * summing
    waited += max(0.0, gathering - forward) if at.deferred else gathering
    return WireTime(busy, waited + moved)


def break_even(dense: WireQuery, other: WireQuery, link: MeasuredLink) -> float | None:
    """The rate (bytes a second) below which `other` has the faster step; None: at no rate.

    Both are asked at links of this one's latency and processor time. Infinite: at every rate.
    """

    def gains(rate: float) -> bool:
        at = MeasuredLink(link.latency, rate, link.cpu)
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


def _busy(wires: Iterable[Wire], at: WireQuery, link: MeasuredLink) -> float:
    ranks = at.layout.ranks
    seconds = 0.0
    for wire in wires:
        around = (ranks - 1) * (2 if wire.collective == "all_reduce" else 1)
        seconds += link.seconds(wire.bytes, around * wire.count)
    return seconds
