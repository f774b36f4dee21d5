"""Who holds up the others: read off what each rank says of its own calls.

Only durations and numbers of calls are compared, never the clocks of two ranks. All ranks of a
collective wait in it for the one that comes last, which itself waits least: the shortest duration
is the late rank's. A rank that has issued fewer calls in a group than others, who are in one, is
the one that they wait for. Nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from modicum.core.ranks.call_ring import BEREFT, ENDED, FAILED
from modicum.core.ranks.rank_reports import DoneCall, OpenCall, RankReport

# Of the others the late rank is compared with the median; those with a root do not wait for all.
COMPARED = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "barrier")
WINDOW = 8  # iterations
PERSISTENT = 3  # so many windows in a row
LONGEST_PERIOD = 256  # calls in an iteration
HELD_SECONDS = 2.0  # without a sign of any thread: one of them holds the interpreter's lock
PATIENCE = 5.0  # times as long may take what is marked, compiles, or holds the lock
FIRST_CALLS = 20  # of a group: what is compiled, warmed up, and learned


@dataclass(frozen=True)
class DiagnosisLimits:
    """When something is said, and when the run is ended.

    Args:
        silent_seconds: a rank whose process is stopped, or whose host says nothing, for so long
            is ended, and the run with it.
        late_seconds: a rank that lives, and for which others wait so long, is named.
        slow_share: of the time of an iteration; a rank for which the others wait as much in each
            is named.
        stopped_seconds: a stopped process is named after so long.
    """

    silent_seconds: float = 8.0
    late_seconds: float = 30.0
    slow_share: float = 0.05
    stopped_seconds: float = 1.5


@dataclass(frozen=True)
class Anomaly:
    """What was found.

    Args:
        kind: `dead`, `stopped`, `silent`, `failed`, `left`, `late` or `slow`.
        rank, host: who holds up the others.
        collective: the call that it has not entered, or is in; empty where none is known.
        inside: whether it is in the call.
        place: where its main thread was last seen.
        seconds: since when.
        ends: whether the run is ended for it.
        share: of a slow rank, what the others wait of an iteration; else 0.
        note: what else is to be known.
    """

    kind: str
    rank: int
    host: str
    collective: str
    inside: bool
    place: str
    seconds: float
    ends: bool
    share: float = 0.0
    note: str = ""

    @property
    def sentence(self) -> str:
        """The anomaly in one sentence."""
        who = f"rank {self.rank} (host {self.host})"
        since = f"since {self.seconds:.0f} s"
        what = {
            "dead": "is dead",
            "stopped": "is stopped",
            "silent": "gives no sign of life",
            "failed": "has failed",
            "left": "has ended, and others wait for it",
        }.get(self.kind, "")
        if self.kind == "slow":
            said = f"{who} is slow: the others wait for it {self.share:.0%} of the time"
        elif self.kind == "late":
            said = f"{who} has not entered {self.collective}"
            return f"{said}; it is in {self.place or 'an unknown place'}, {since}{self._noted()}"
        else:
            said = f"{who} {what} {since}"
            if self.collective:
                where = "in" if self.inside else "and has not entered"
                said += f", {where} {self.collective}"
        if self.place:
            said += f"; it was last seen in {self.place}"
        return said + self._noted()

    def _noted(self) -> str:
        return f" ({self.note})" if self.note else ""

    def as_json(self) -> dict[str, Any]:
        """The anomaly as plain values, its sentence among them."""
        return asdict(self) | {"sentence": self.sentence}


@dataclass
class _Seen:
    """A rank's last report, and when it came."""

    report: RankReport
    when: float


@dataclass
class _Compared:
    """A call that has ended at all ranks of its group: durations and ends by rank."""

    signature: tuple[str, str, int]
    seconds: dict[int, float]
    ended: dict[int, float]
    marked: bool


@dataclass
class _GroupCalls:
    """The calls of a group, as they end at one rank after the other."""

    members: tuple[int, ...]
    pending: dict[int, dict[int, DoneCall]] = field(default_factory=dict)
    last: deque[_Compared] = field(
        default_factory=lambda: deque(maxlen=(WINDOW + 2) * LONGEST_PERIOD)
    )
    through: dict[int, int] = field(default_factory=dict)  # calls that have ended, by rank
    fresh: int = 0
    streak: tuple[int, int] = (-1, 0)
    named: int = -1


class Judge:
    """Takes reports of all ranks, in any order, and says what is wrong.

    Args:
        size: how many ranks there are.
        now: an instant of the clock by which reports come in.
    """

    def __init__(self, size: int, limits: DiagnosisLimits, now: float) -> None:
        self._size, self._limits, self._begun = size, limits, now
        self._seen: dict[int, _Seen] = {}
        self._groups: dict[str, _GroupCalls] = {}
        self._named: set[tuple[Any, ...]] = set()
        self._ending = False

    def add(self, reports: Iterable[RankReport], now: float) -> None:
        """Take what came in at `now`."""
        for report in reports:
            self._seen[report.rank] = _Seen(report, now)
            for name, members in report.members.items():
                known = self._groups.get(name)
                if known is None or known.members != members:
                    self._groups[name] = _GroupCalls(members)
            for call in report.done:
                self._done(report.rank, call)

    def look(self, now: float) -> list[Anomaly]:
        """What is wrong at `now`, and has not been said."""
        if self._ending:
            return []
        found = [*self._gone(now), *self._late(now), *self._slow()]
        fresh = []
        for one in found:
            key = (one.kind, one.rank, one.ends, one.collective if one.kind == "late" else "")
            if key not in self._named:
                self._named.add(key)
                fresh.append(one)
        ending = [one for one in fresh if one.ends]
        self._ending = bool(ending)
        return [*[one for one in fresh if not one.ends], *ending[:1]]

    # Who is gone

    def _gone(self, now: float) -> list[Anomaly]:
        found = []
        for rank, seen in sorted(self._seen.items(), key=lambda item: -self._dead_for(item[1])):
            report, since = seen.report, now - seen.when
            if report.left == FAILED:
                found.append(self._anomaly("failed", rank, now, since, ends=True))
            elif report.left in (ENDED, BEREFT):
                continue
            elif report.process == "dead":
                stood = report.process_seconds + since
                found.append(self._anomaly("dead", rank, now, stood, ends=True))
            elif since >= self._limits.silent_seconds:
                found.append(self._anomaly("silent", rank, now, since, ends=True))
            elif report.process == "stopped":
                stood = report.process_seconds + since
                if stood >= self._limits.stopped_seconds:
                    ends = stood >= self._limits.silent_seconds
                    found.append(self._anomaly("stopped", rank, now, stood, ends=ends))
        return found

    @staticmethod
    def _dead_for(seen: _Seen) -> float:
        return seen.report.process_seconds if seen.report.process == "dead" else -1.0

    def _anomaly(
        self, kind: str, rank: int, now: float, seconds: float, *, ends: bool = False
    ) -> Anomaly:
        report = self._seen[rank].report
        inside = call = self._inside(report)
        if call is None:
            waited = [one for one, _, lacking in self._waits(now) if rank in lacking]
            call = max(waited, key=lambda one: one.seconds, default=None)
        collective = "" if call is None else said_of(call)
        words = report.words if kind == "failed" else ""
        return Anomaly(
            kind, rank, report.host, collective, inside is not None, report.place, seconds, ends,
            note=words,
        )  # fmt: skip

    def _inside(self, report: RankReport) -> OpenCall | None:
        """The first call that a rank is in, but for those that have ended at another.

        That one of those has ended here too, no thread of the rank has come to say.
        """
        for call in sorted(report.open, key=lambda one: one.sequence):
            group = self._groups.get(call.group)
            through = group.through.items() if group else ()
            if all(count <= call.sequence for rank, count in through if rank != report.rank):
                return call
        return None

    # Who is late

    def _waits(self, now: float) -> list[tuple[OpenCall, float, list[int]]]:
        """Calls in which some rank is, for how long, and who has not issued them."""
        found = []
        for seen in self._seen.values():
            for call in seen.report.open:
                group = self._groups.get(call.group)
                members = group.members if group else ()
                lacking = [
                    rank
                    for rank in members
                    if rank in self._seen
                    and self._seen[rank].report.entered.get(call.group, 0) <= call.sequence
                ]
                if lacking:
                    found.append((call, call.seconds + now - seen.when, lacking))
        return found

    def _late(self, now: float) -> list[Anomaly]:
        worst: dict[int, tuple[float, OpenCall]] = {}
        for call, seconds, lacking in self._waits(now):
            for rank in lacking:
                if seconds > worst.get(rank, (0.0, call))[0]:
                    worst[rank] = (seconds, call)
        found = []
        for rank, (seconds, call) in worst.items():
            report = self._seen[rank].report
            if report.left == ENDED and seconds > self._limits.stopped_seconds:
                found.append(self._anomaly("left", rank, now, seconds, ends=True))
            if report.left or report.process != "running" or self._inside(report):
                continue  # it is named by another rule, or waits for others itself
            patience = PATIENCE if self._busy(report) or call.sequence < FIRST_CALLS else 1.0
            if seconds >= self._limits.late_seconds * patience:
                held = report.beat_seconds >= HELD_SECONDS
                found.append(
                    Anomaly(
                        "late", rank, report.host, said_of(call), False, report.place, seconds,
                        ends=False, note="it holds the interpreter's lock" if held else "",
                    )
                )  # fmt: skip
        return found

    @staticmethod
    def _busy(report: RankReport) -> bool:
        return report.marked or report.beat_seconds >= HELD_SECONDS

    # Who is slow

    def _done(self, rank: int, call: DoneCall) -> None:
        group = self._groups.get(call.group)
        if group is None or rank not in group.members or len(group.members) < 2:
            return
        group.through[rank] = max(group.through.get(rank, 0), call.sequence + 1)
        ranks = group.pending.setdefault(call.sequence, {})
        ranks[rank] = call
        if len(ranks) < len(group.members):
            if len(group.pending) > LONGEST_PERIOD * WINDOW:  # calls that were written over
                del group.pending[min(group.pending)]
            return
        del group.pending[call.sequence]
        if call.kind in COMPARED and call.sequence >= FIRST_CALLS:
            marked = any(one.marked for one in ranks.values())
            group.last.append(
                _Compared(
                    (call.kind, call.label, call.bytes),
                    {rank: one.seconds for rank, one in ranks.items()},
                    {rank: one.ended for rank, one in ranks.items()},
                    marked,
                )
            )
            group.fresh += 1

    def _slow(self) -> list[Anomaly]:
        found = []
        for group in self._groups.values():
            period = _period(group.last) if group.fresh else 0
            if not period or group.fresh < period:
                continue
            group.fresh = 0
            rank, share = _waited_for(group.last, period, group.members)
            if share < self._limits.slow_share:
                group.streak = (-1, 0)
                if share < self._limits.slow_share / 2 and group.named >= 0:
                    self._named.discard(("slow", group.named, False, ""))
                    group.named = -1
                continue
            same = group.streak[0] == rank
            group.streak = (rank, group.streak[1] + 1 if same else 1)
            if group.streak[1] >= PERSISTENT and rank in self._seen:
                group.named = rank
                report = self._seen[rank].report
                found.append(
                    Anomaly("slow", rank, report.host, "", False, report.place, 0.0, False, share)
                )
        return found


def said_of(call: OpenCall) -> str:
    """A call, for people: `all-gather 5124 of layers.17`."""
    return f"{call.kind} {call.sequence}" + (f" of {call.label}" if call.label else "")


def _period(calls: deque[_Compared]) -> int:
    """After how many calls an iteration begins anew; 0 where that is not known yet."""
    signatures = [call.signature for call in calls]
    for period in range(1, min(LONGEST_PERIOD, len(signatures) // WINDOW) + 1):
        tail = signatures[-3 * period :]
        if tail == tail[:period] * 3:
            return period
    return 0


def _waited_for(
    calls: deque[_Compared], period: int, members: tuple[int, ...]
) -> tuple[int, float]:
    """The rank for which the others wait most, and which share of their time.

    Of the last iterations those with the largest and the smallest wait are left out. It must be
    the last to come in all of them but one; otherwise the share is 0.
    """
    last = list(calls)[-WINDOW * period - 1 :]
    if len(last) <= WINDOW * period or any(call.marked for call in last):
        return -1, 0.0
    waits: list[Mapping[int, float]] = []
    spans: list[float] = []
    for start in range(1, len(last), period):
        iteration = last[start : start + period]
        late: dict[int, float] = dict.fromkeys(members, 0.0)
        for call in iteration:
            for rank in members:
                others = [call.seconds[other] for other in members if other != rank]
                late[rank] += statistics.median(others) - call.seconds[rank]
        waits.append(late)
        ends, before = iteration[-1].ended, last[start - 1].ended
        spans.append(statistics.median(ends[rank] - before[rank] for rank in members))
    suspect = max(members, key=lambda rank: statistics.median(wait[rank] for wait in waits))
    if sum(max(wait, key=lambda rank: wait[rank]) == suspect for wait in waits) < WINDOW - 1:
        return suspect, 0.0
    kept = sorted(range(len(waits)), key=lambda at: waits[at][suspect])[1:-1]
    total = sum(spans[at] for at in kept)
    return suspect, sum(waits[at][suspect] for at in kept) / total if total > 0 else 0.0
