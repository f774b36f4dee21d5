"""Which rank the others wait for in every iteration, by durations of calls alone.

All ranks of a collective wait in it for the one that comes last, which itself waits least: the
shortest duration is the late rank's. One iteration says little, as somebody is always last. So a
rank is slow where the others waited for it in nearly all of the last iterations, longer than they
did before; or, where it was slow from the beginning on, in twice as many. Nothing here imports
torch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from modicum.core.ranks.rank_reports import DoneCall

# Of the others the late rank is compared with the median; those with a root do not wait for all.
COMPARED = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "barrier")
FIRST_CALLS = 20  # of a group: what is compiled, warmed up, and learned
LONGEST_PERIOD = 256  # calls in an iteration
WINDOW = 8  # iterations; of so many one may be an exception
LEAST_SECONDS = 0.75  # for which it must last, since other programs disturb for as long as that
LEAST_WAIT = 0.002  # seconds of an iteration, below which nothing is worth a word
MOST_ITERATIONS = 256
HISTORY, USUAL = 64, 0.9  # iterations before, and which quantile of their waits is no surprise


@dataclass(frozen=True)
class ComparedCall:
    """A call that has ended at all ranks of its group: durations and ends by rank."""

    signature: tuple[str, str, int]
    seconds: dict[int, float]
    ended: dict[int, float]
    marked: bool


@dataclass(frozen=True)
class SlowFinding:
    """The rank for which the others wait, and which share of their time."""

    rank: int
    share: float


@dataclass(frozen=True)
class _Iteration:
    """Seconds that the others waited for each rank, and those that the iteration took."""

    waits: Mapping[int, float]
    span: float


@dataclass
class GroupCalls:
    """The calls of a group, as they end at one rank after the other.

    Args:
        members: its ranks.

    Attributes:
        through: calls that have ended, by rank.
        named: the rank that was called slow; -1: none.
    """

    members: tuple[int, ...]
    through: dict[int, int] = field(default_factory=dict)
    named: int = -1
    _pending: dict[int, dict[int, DoneCall]] = field(default_factory=dict)
    _last: deque[ComparedCall] = field(default_factory=lambda: deque(maxlen=8 * LONGEST_PERIOD + 1))
    _fresh: int = 0
    _period: int = 0
    _iterations: deque[_Iteration] = field(
        default_factory=lambda: deque(maxlen=MOST_ITERATIONS + HISTORY)
    )

    def done(self, rank: int, call: DoneCall) -> None:
        """A call has ended at a rank."""
        if rank not in self.members or len(self.members) < 2:
            return
        self.through[rank] = max(self.through.get(rank, 0), call.sequence + 1)
        ranks = self._pending.setdefault(call.sequence, {})
        ranks[rank] = call
        if len(ranks) < len(self.members):
            if len(self._pending) > LONGEST_PERIOD * WINDOW:  # calls that were written over
                del self._pending[min(self._pending)]
            return
        del self._pending[call.sequence]
        if call.kind in COMPARED and call.sequence >= FIRST_CALLS:
            self._last.append(
                ComparedCall(
                    (call.kind, call.label, call.bytes),
                    {rank: one.seconds for rank, one in ranks.items()},
                    {rank: one.ended for rank, one in ranks.items()},
                    any(one.marked for one in ranks.values()),
                )
            )
            self._fresh = min(self._fresh + 1, len(self._last) - 1)

    def slow(self, share: float) -> SlowFinding | None:
        """Who has become slow since this was last asked, by a share of the time at least."""
        if not self._grown():
            return None
        window = self._window()
        if window is None:
            return None
        last, before = window
        found = self._surprising(last, before, share) or self._lasting(len(last), share)
        if found is not None and found.rank != self.named:
            self.named = found.rank
            return found
        return None

    def recovered(self, share: float) -> int:
        """The rank that was called slow, and for which nobody waits any more; -1: none."""
        window = self._window() if self.named >= 0 else None
        if window is None or _share(window[0], self.named) >= share / 2:
            return -1
        rank, self.named = self.named, -1
        return rank

    def _grown(self) -> bool:
        """Make iterations of the calls that have come; whether there is a new one."""
        if not self._fresh:
            return False
        calls = list(self._last)
        if not _repeats(calls, self._period):
            self._period = next((p for p in range(1, LONGEST_PERIOD + 1) if _repeats(calls, p)), 0)
        period, grown = self._period, False
        while period and self._fresh >= period:
            start = len(calls) - self._fresh
            part = calls[start : start + period]
            # An iteration may begin anywhere, as long as it is one of those at the end.
            at = (start - len(calls)) % period - period
            usual = [*calls[at:], *calls[-period:at]]
            alike = all(a.signature == b.signature for a, b in zip(part, usual, strict=True))
            if alike and not any(call.marked for call in part):
                self._iterations.append(_iteration(part, calls[start - 1], self.members))
                grown = True
            self._fresh -= period
        return grown

    def _window(self) -> tuple[list[_Iteration], list[_Iteration]] | None:
        """The last iterations, and those before."""
        known = list(self._iterations)
        if len(known) < WINDOW:
            return None
        span = statistics.median(one.span for one in known[-WINDOW:])
        most = MOST_ITERATIONS // 2
        size = WINDOW if span <= 0 else max(WINDOW, math.ceil(min(most, LEAST_SECONDS / span)))
        if len(known) < size:
            return None
        return known[-size:], known[-size - HISTORY : -size]

    def _surprising(
        self, last: Sequence[_Iteration], before: Sequence[_Iteration], share: float
    ) -> SlowFinding | None:
        """Who is waited for in nearly all of the last iterations, longer than before."""
        if len(before) < 2 * WINDOW:
            return None
        rank = _suspect(last, self.members)
        usual = sorted(one.waits[rank] for one in before)[math.floor(USUAL * len(before))]
        least = max(LEAST_WAIT, usual)
        count = sum(one.waits[rank] > max(least, share * one.span) for one in last)
        found = SlowFinding(rank, _share(last, rank))
        enough = count >= len(last) - len(last) // WINDOW and found.share >= share
        return found if enough else None

    def _lasting(self, size: int, share: float) -> SlowFinding | None:
        """Who is the last in nearly all of twice as many iterations, whatever was before."""
        last = list(self._iterations)[-2 * size :]
        if len(last) < 2 * size:
            return None
        rank = _suspect(last, self.members)
        count = sum(
            one.waits[rank] > LEAST_WAIT and _suspect([one], self.members) == rank for one in last
        )
        found = SlowFinding(rank, _share(last, rank))
        enough = count >= len(last) - len(last) // WINDOW and found.share >= share
        return found if enough else None


def _suspect(iterations: Sequence[_Iteration], members: Sequence[int]) -> int:
    """For whom the others wait most."""
    return max(members, key=lambda rank: statistics.median(one.waits[rank] for one in iterations))


def _share(iterations: Sequence[_Iteration], rank: int) -> float:
    """Which share of the time the others wait for a rank; the extremes are left out."""
    kept = sorted(iterations, key=lambda one: one.waits[rank])[1:-1]
    total = sum(one.span for one in kept)
    return sum(one.waits[rank] for one in kept) / total if total > 0 else 0.0


def _iteration(
    part: Sequence[ComparedCall], before: ComparedCall, members: Sequence[int]
) -> _Iteration:
    waits = dict.fromkeys(members, 0.0)
    for call in part:
        for rank in members:
            others = [call.seconds[other] for other in members if other != rank]
            waits[rank] += statistics.median(others) - call.seconds[rank]
    ends = part[-1].ended
    return _Iteration(waits, statistics.median(ends[rank] - before.ended[rank] for rank in members))


def _repeats(calls: Sequence[ComparedCall], period: int) -> bool:
    """Whether the last calls are three iterations of so many."""
    if not 0 < period <= len(calls) // 3:
        return False
    size = len(calls)
    return all(
        calls[at].signature == calls[at - period].signature
        for at in range(size - 1, size - 1 - 2 * period, -1)
    )
