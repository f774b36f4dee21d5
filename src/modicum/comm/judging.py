"""Who holds up the others: read off what each rank says of its own calls.

Only durations and numbers of calls are compared, never the clocks of two ranks. A rank that has
issued fewer calls in a group than others, who are in one, is the one that they wait for; who is
slow in every iteration, `slowness` says, and which link between two of them, `slow_links`. Where
all processes are stopped, as by Ctrl-Z, nobody waits for anybody. Nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from modicum.comm.slow_links import LinkMessages, SlowLink
from modicum.comm.slowness import FIRST_CALLS, GroupCalls
from modicum.core.ranks.call_ring import BEREFT, ENDED, FAILED
from modicum.core.ranks.observed_calls import MESSAGES
from modicum.core.ranks.rank_reports import DoneCall, OpenCall, RankReport
from modicum.core.units import format_bytes

HELD_SECONDS = 2.0  # without a sign of any thread: one of them holds the interpreter's lock
TOGETHER_SECONDS = 1.0  # within which all hosts fall silent of which one cable is cut
PATIENCE = 5.0  # times as long may take what is marked, compiles, or holds the lock


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
        kind: `dead`, `stopped`, `silent`, `cut off`, `failed`, `left`, `late`, `slow`, `slow link`
            or `slow port`.
        rank, host: who holds up the others; of a link, who sends over it.
        collective: the call that it has not entered, or is in; empty where none is known.
        inside: whether it is in the call.
        place: where its main thread was last seen.
        seconds: since when.
        ends: whether the run is ended for it.
        share: of a slow rank, what the others wait of an iteration; else 0.
        note: what else is to be known.
        peer, peer_host: of a link, who receives; else -1.
        port: of a slow port whether it is that `out` of the rank, or `in`.
        rate, usual_rate: bytes a second of a link, now and before.
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
    peer: int = -1
    peer_host: str = ""
    port: str = ""
    rate: float = 0.0
    usual_rate: float = 0.0

    @property
    def sentence(self) -> str:
        """The anomaly in one sentence."""
        who = f"rank {self.rank} (host {self.host})"
        since = f"since {self.seconds:.0f} s"
        what = {
            "dead": "is dead",
            "stopped": "is stopped",
            "silent": "gives no sign of life",
            "cut off": "is cut off from all other hosts",
            "failed": "has failed",
            "left": "has ended, and others wait for it",
        }.get(self.kind, "")
        if self.rate:
            return self._of_link(who) + self._noted()
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

    def _of_link(self, who: str) -> str:
        rates = [f"{format_bytes(round(rate))} a second" for rate in (self.rate, self.usual_rate)]
        what = f"the link {who} -> rank {self.peer} (host {self.peer_host})"
        if self.port:
            what = f"the port of {who}, {self.port},"
        since = f"since {self.collective}, {self.seconds:.1f} s ago"
        return f"{what} is slow {since}: {rates[0]}, and {rates[1]} before"

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


class Judge:
    """Takes reports of all ranks, in any order, and says what is wrong.

    Args:
        size: how many ranks there are.
        now: an instant of the clock by which reports come in.
    """

    def __init__(self, size: int, limits: DiagnosisLimits, now: float) -> None:
        self._size, self._limits, self._begun = size, limits, now
        self._seen: dict[int, _Seen] = {}
        self._groups: dict[str, GroupCalls] = {}
        self._named: set[tuple[Any, ...]] = set()
        self._starved: set[int] = set()
        self._messages = LinkMessages()
        # By rank the seconds that it has waited for messages; by group and rank how many of these
        # were before the last call.
        self._waited = defaultdict[int, float](float)
        self._waited_before: dict[tuple[str, int], float] = {}
        self._ending = False

    def add(self, reports: Iterable[RankReport], now: float) -> None:
        """Take what came in at `now`."""
        for report in reports:
            self._seen[report.rank] = _Seen(report, now)
            for name, members in report.members.items():
                known = self._groups.get(name)
                if known is None or known.members != members:
                    self._groups[name] = GroupCalls(members)
            for call in report.done:
                self._done(report.rank, call)

    def _done(self, rank: int, call: DoneCall) -> None:
        """A call has ended at a rank; what it waited for messages before counts as in the call.

        So a rank that comes late since a link is slow, or since another one is, is not slow itself.
        """
        if (group := self._groups.get(call.group)) is None:
            return
        if call.kind in MESSAGES:
            self._waited[rank] += call.waited
            self._messages.done(group.members, call)
            return
        key, waited = (call.group, rank), self._waited[rank]
        apart = waited - self._waited_before.get(key, waited)
        self._waited_before[key] = waited
        group.done(rank, replace(call, seconds=call.seconds + apart) if apart else call)

    def look(self, now: float) -> list[Anomaly]:
        """What is wrong at `now`, and has not been said."""
        if self._ending:
            return []
        found = [*self._gone(now), *self._late(now), *self._slow()]
        fresh = [self._of_link(one) for one in self._messages.slow()]
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
        living = [seen.report.process for seen in self._seen.values()]
        all_stopped = "running" not in living and "stopped" in living
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
                if self._cut_off(now):
                    found.append(self._anomaly("cut off", 0, now, since, ends=True))
                    break
                found.append(self._anomaly("silent", rank, now, since, ends=True))
            elif report.process == "stopped" and not all_stopped:
                stood = report.process_seconds + since
                if stood >= self._limits.stopped_seconds:
                    ends = stood >= self._limits.silent_seconds
                    found.append(self._anomaly("stopped", rank, now, stood, ends=ends))
        return found

    def _cut_off(self, now: float) -> bool:
        """Whether nothing is heard of any other host than rank 0's, of which there are several."""
        here = self._seen[0].report.host if 0 in self._seen else None
        silent = self._limits.silent_seconds - TOGETHER_SECONDS
        elsewhere = {
            seen.report.host: now - seen.when >= silent
            for seen in self._seen.values()
            if seen.report.host != here
        }
        return here is not None and len(elsewhere) > 1 and all(elsewhere.values())

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

    def _slow(self) -> list[Anomaly]:
        found, least = [], self._limits.slow_share
        for group in self._groups.values():
            before, slow = group.named, group.slow(least)
            if slow is not None:
                self._named.discard(("slow", before, False, ""))
            if slow is not None and slow.rank in self._seen:
                report = self._seen[slow.rank].report
                note = self._starving(slow.rank, slow.share, group.members)
                if not note or slow.rank not in self._starved:
                    found.append(
                        Anomaly(
                            "slow", slow.rank, report.host, "", False, report.place, 0.0, False,
                            slow.share, note,
                        )
                    )  # fmt: skip
                if note:
                    self._starved.add(slow.rank)
            if (rank := group.recovered(least)) >= 0:
                self._named.discard(("slow", rank, False, ""))
        return found

    def _of_link(self, found: SlowLink) -> Anomaly:
        rank, peer = found.source, found.target
        if found.port:
            rank, peer = (rank if found.port == "out" else peer), -1
        hosts = [self._seen[one].report.host if one in self._seen else "" for one in (rank, peer)]
        ends = [one for one in (rank, peer) if one in self._seen]
        starving = [self._starving(one, 0.5, self._seen) for one in ends]
        notes = [found.note, *starving]
        return Anomaly(
            "slow port" if found.port else "slow link", rank, hosts[0], f"send {found.since}",
            False, "", found.seconds, ends=False, note="; ".join(filter(None, notes)), peer=peer,
            peer_host=hosts[1], port=found.port, rate=found.rate, usual_rate=found.usual_rate,
        )  # fmt: skip

    def _starving(self, rank: int, share: float, members: Iterable[int]) -> str:
        """That other programs have the processors of a slow rank, where that is why it is slow.

        That is so where it waited for a processor for so much longer than the others did. It is
        said once of a rank, as it comes and goes.
        """
        known = {one: self._seen[one].report.starved for one in members if one in self._seen}
        usual = statistics.median(part for one, part in known.items() if one != rank)
        if known[rank] - usual < share / 2:
            return ""
        return (
            f"other programs have its processor {known[rank]:.0%} of the time, those of the "
            f"others {usual:.0%}; it is not named for that again"
        )


def said_of(call: OpenCall) -> str:
    """A call, for people: `all-gather 5124 of layers.17`."""
    return f"{call.kind} {call.sequence}" + (f" of {call.label}" if call.label else "")
