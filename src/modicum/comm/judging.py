"""Who holds up the others: read off what each rank says of its own calls.

Only durations and numbers of calls are compared, never the clocks of two ranks. A rank that has
issued fewer calls in a group than others, who are in one, is the one that they wait for; who is
slow in every iteration, `slowness` says, and which link between two of them, `slow_links`. Where
all processes are stopped, as by Ctrl-Z, nobody waits for anybody. Nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from modicum.comm.anomalies import EITHER_END, Anomaly, DiagnosisLimits
from modicum.comm.slow_links import LinkMessages, SlowLink
from modicum.comm.slowness import FIRST_CALLS, GroupCalls
from modicum.core.ranks.call_ring import BEREFT, ENDED, FAILED
from modicum.core.ranks.observed_calls import MESSAGES, RECEIVE, SEND, is_link
from modicum.core.ranks.rank_reports import MOST_GROUPS, DoneCall, OpenCall, RankReport

HELD_SECONDS = 2.0  # without a sign of any thread: one of them holds the interpreter's lock
TOGETHER_SECONDS = 1.0  # within which all hosts fall silent when one cable is pulled
PATIENCE = 5.0  # times as long may take what is marked, compiles, or holds the lock


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
        self._travel: dict[tuple[str, int], float] = {}  # messages, and since when they do
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
            if len(group.members) == 2:
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
        found += self._stuck(now)
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
                if len(elsewhere := self._elsewhere(now)) > 1 and all(elsewhere.values()):
                    found.append(self._anomaly("isolated", 0, now, since, ends=True))
                    break
                note = EITHER_END if len(elsewhere) == 1 else ""
                found.append(self._anomaly("silent", rank, now, since, ends=True, note=note))
            elif report.process == "stopped" and not all_stopped:
                stood = report.process_seconds + since
                if stood >= self._limits.stopped_seconds:
                    ends = stood >= self._limits.silent_seconds
                    found.append(self._anomaly("stopped", rank, now, stood, ends=ends))
        return found

    def _elsewhere(self, now: float) -> dict[str, bool]:
        """Hosts other than rank 0's, and whether nothing is heard of them."""
        here = self._seen[0].report.host if 0 in self._seen else None
        silent = self._limits.silent_seconds - TOGETHER_SECONDS
        return {
            seen.report.host: now - seen.when >= silent
            for seen in self._seen.values()
            if seen.report.host != here
        }

    @staticmethod
    def _dead_for(seen: _Seen) -> float:
        return seen.report.process_seconds if seen.report.process == "dead" else -1.0

    def _anomaly(
        self,
        kind: str,
        rank: int,
        now: float,
        seconds: float,
        *,
        ends: bool = False,
        note: str = "",
    ) -> Anomaly:
        report = self._seen[rank].report
        inside = call = self._inside(report)
        if call is None:
            waited = [one for one, _, lacking in self._waits(now) if rank in lacking]
            call = max(waited, key=lambda one: one.seconds, default=None)
        collective = "" if call is None else self._said_of(call, rank)
        words = report.words if kind == "failed" else note
        return Anomaly(
            kind, rank, report.host, collective, inside is not None, report.place, seconds, ends,
            note=words,
        )  # fmt: skip

    def _inside(self, report: RankReport) -> OpenCall | None:
        """The first call that a rank is in, but for those that have ended at another.

        That one of those has ended here too, no thread of the rank has come to say.
        """
        for call in sorted(report.open, key=lambda one: (one.kind not in MESSAGES, one.sequence)):
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
                lacking = [rank for rank in members if self._lacks(rank, call)]
                if lacking:
                    found.append((call, call.seconds + now - seen.when, lacking))
        return found

    def _lacks(self, rank: int, call: OpenCall) -> bool:
        """Whether a rank has not begun a call; of too many links it does not say."""
        if (seen := self._seen.get(rank)) is None:
            return False
        begun = seen.report.entered.get(call.group)
        if begun is None:
            return not is_link(call.group) or len(seen.report.entered) < MOST_GROUPS
        return begun <= call.sequence

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
                        "late", rank, report.host, self._said_of(call, rank), False, report.place,
                        seconds,
                        ends=False, note="it holds the interpreter's lock" if held else "",
                    )
                )  # fmt: skip
        return found

    @staticmethod
    def _busy(report: RankReport) -> bool:
        return report.marked or report.beat_seconds >= HELD_SECONDS

    def _said_of(self, call: OpenCall, rank: int) -> str:
        """A call of a rank, for people: `all-gather 5124 of layers.17`, `send 12 to rank 3`."""
        label = f" of {call.label}" if call.label else ""
        group = self._groups.get(call.group)
        if call.kind not in MESSAGES or group is None or len(group.members) != 2:
            return f"{call.kind} {call.sequence}{label}"
        source, target = group.members
        kind, end = (
            (SEND, f"to rank {target}") if rank == source else (RECEIVE, f"from rank {source}")
        )
        return f"{kind} {call.sequence} {end}{label}"

    def _stuck(self, now: float) -> list[Anomaly]:
        """Messages that do not come, though both ends stand there, and neither is stopped.

        After so long a run ends as for a silent host, where no message of the link took nearly as
        long before.
        """
        calls = {(call.group, call.sequence): call for call in self._travelling()}
        self._travel = {key: self._travel.get(key, now) for key in calls}
        found = []
        for key, call in calls.items():
            stood = now - self._travel[key]
            if patience := self._messages.patience(call.group):
                least = max(patience, self._limits.silent_seconds)
                found.append((stood - least, stood, self._groups[call.group].members, call))
        longest = max(found, key=lambda one: one[0], default=None)
        if longest is None or longest[0] < 0:
            return []
        _, stood, (source, target), call = longest
        ends = [set(one[2]) for one in found if one[0] >= -TOGETHER_SECONDS]
        common = sorted(set.intersection(*ends)) if len(ends) > 1 else []
        kind, rank, peer = "stuck link", source, target
        if len(common) == 1:
            kind, rank, peer = "stuck port", common[0], -1
        hosts = [self._seen[one].report.host if one >= 0 else "" for one in (rank, peer)]
        return [
            Anomaly(
                kind, rank, hosts[0], self._said_of(call, source), True, "", stood, ends=True,
                peer=peer, peer_host=hosts[1],
            )
        ]  # fmt: skip

    def _travelling(self) -> Iterator[OpenCall]:
        """Messages that an end waits for, and that the other has begun as well."""
        for seen in self._seen.values():
            for call in seen.report.open:
                group = self._groups.get(call.group)
                if call.kind not in MESSAGES or group is None or len(group.members) != 2:
                    continue
                ends = [self._seen.get(rank) for rank in group.members]
                ordinary = all(
                    end and end.report.process == "running" and not end.report.marked
                    for end in ends
                )
                if ordinary and not any(self._lacks(rank, call) for rank in group.members):
                    yield call

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
