"""Measures the links between ranks: what a call takes a step, a byte, and of the processor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from modicum.core.errors import InputError
from modicum.core.machine.links import MeasuredLink, fitted
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.exchange import ExchangeContext, ShardExchange
from modicum.core.ranks.ranks import Ranks

# Bytes of an all-reduce: below, latency is all there is; above, steps of training send in parts.
SIZES = (4_096, 65_536, 524_288, 2_097_152, 8_388_608)
_REPEATS, _LEAST, _SECONDS = 15, 3, 1.0  # of a size: calls at most, at least, and the time for more


@dataclass(frozen=True)
class LinkPoint:
    """Seconds of an all-reduce of so many bytes: the median, and the range."""

    bytes: int
    sent: int
    median: float
    least: float
    most: float


def measure_links(
    ranks: Ranks, sizes: Sequence[int] = SIZES
) -> dict[str, tuple[MeasuredLink, list[LinkPoint]]]:
    """Every axis along which there is somebody: its link, and what that was made of.

    All ranks call this, and have the same answer: that of the slowest.

    Raises:
        InputError: there is one rank alone.
    """
    if ranks.alone:
        raise InputError(
            "one rank alone has no link; start more with --ranks, or with torchrun on all hosts",
            field="--ranks",
            value=1,
            allowed="2 or more",
        )
    exchange = ShardExchange(ExchangeContext(ranks))
    found = {axis: _measured(ranks, exchange.wire(axis), sizes) for axis in exchange.nodes.hops()}
    exchange.close()
    return found


def _measured(
    ranks: Ranks, wire: Collectives, sizes: Sequence[int]
) -> tuple[MeasuredLink, list[LinkPoint]]:
    points, sent, cpu = [], 0, 0.0
    for size in sizes:
        buffer = torch.zeros(size // 4)
        seconds: list[float] = []
        wire.all_reduce(buffer).wait()  # connections and buffers
        begun, used, before = time.perf_counter(), time.process_time(), wire.meter.bytes.total()
        while True:
            wire.total(torch.zeros(1))  # all begin at once
            started = time.perf_counter()
            wire.all_reduce(buffer).wait()
            seconds.append(time.perf_counter() - started)
            late = time.perf_counter() - begun > _SECONDS and len(seconds) >= _LEAST
            # Ranks make as many calls, whoever is slow.
            if wire.total(torch.tensor([float(late or len(seconds) >= _REPEATS)])) > 0:
                break
        sent, cpu = wire.meter.bytes.total() - before, time.process_time() - used
        median, most = ranks.max(statistics.median(seconds), max(seconds))
        [least] = ranks.min(min(seconds))
        per_call = 2 * (wire.size - 1) * size // wire.size
        points.append(LinkPoint(size, per_call, median, least, most))
    steps = 2 * (wire.size - 1)
    latency, rate = fitted([p.sent for p in points], steps, [p.median for p in points])
    # Of the largest calls, in which bytes are all that matters.
    [of_a_byte] = ranks.max(cpu / sent)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return MeasuredLink(latency, rate, of_a_byte, wire.size, when), points
