"""Who holds up the others: read off what each rank says of its own calls.

Only durations and numbers of calls are compared, never the clocks of two ranks. A rank that has
issued fewer calls in a group than others, who are in one, is the one that they wait for. Who is
slow in every iteration, `slowness` says; which links between them are slow, `slow_links`, and which
one stands still, `stuck_links`. Where all processes are stopped, as by Ctrl-Z, nobody waits
for anybody. Nothing here imports torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from modicum.comm.anomalies import (
    EITHER_END,
    TOGETHER_SECONDS,
    Anomaly,
    DiagnosisLimits,
    between_groups,
)
from modicum.comm.link_patterns import IN
from modicum.comm.seen_ranks import SeenRanks
from modicum.comm.slow_links import SlowLink
from modicum.comm.slowness import FIRST_CALLS
from modicum.comm.stuck_links import StuckLinks
from modicum.core.ranks.call_ring import BEREFT, ENDED, FAILED
from modicum.core.ranks.rank_reports import OpenCall, RankReport

PATIENCE = 5.0  # times as long may take what is marked, compiles, or holds the lock


class Judge:
    """Takes reports of all ranks, in any order, and says what is wrong."""

    def __init__(self, limits: DiagnosisLimits) -> None:
        self._limits, self._seen = limits, SeenRanks()
        self._stuck = StuckLinks(self._seen, limits.silent_seconds)
        self._named: set[tuple[Any, ...]] = set()
        self._starved: set[int] = set()
        self._ending = False
        self._resumed = -math.inf  # when all processes were last stopped together

    def add(self, reports: Iterable[RankReport], now: float) -> None:
        """Take what came in at `now`."""
        self._seen.add(reports, now)

    def resumed(self, now: float) -> None:
        """Nobody looked until `now`, as this process was stopped too: from here on times count."""
        self._resumed = now
        self._stuck.resumed(now)
        self._seen.heard(now)

    def look(self, now: float) -> list[Anomaly]:
        """What is wrong at `now`, and has not been said."""
        if self._ending:
            return []
        found = [*self._gone(now), *self._late(now), *self._apart(now), *self._slow()]
        fresh = [self._of_link(one) for one in self._seen.messages.slow()]
        found += self._stuck.look(now)
        for one in found:
            which = one.collective if one.kind in ("late", "apart") else ""
            key = (one.kind, one.rank, one.ends, which)
            if key not in self._named:
                self._named.add(key)
                fresh.append(one)
        ending = [one for one in fresh if one.ends]
        self._ending = bool(ending)
        return [*[one for one in fresh if not one.ends], *ending[:1]]

    # Who is gone

    def _gone(self, now: float) -> list[Anomaly]:
        found, limits = [], self._limits
        living = [seen.report.process for seen in self._seen.by_rank.values()]
        all_stopped = "running" not in living and "stopped" in living
        if all_stopped:
            self._resumed = now
        for rank, seen in sorted(self._seen.by_rank.items(), key=lambda item: -item[1].dead_for):
            report, since = seen.report, now - seen.when
            if report.left == FAILED:
                found.append(self._anomaly("failed", rank, now, since, ends=True))
            elif report.left in (ENDED, BEREFT):
                continue
            elif report.process == "dead":
                stood = report.process_seconds + since
                found.append(self._anomaly("dead", rank, now, stood, ends=True))
            elif since >= limits.silent_seconds:
                elsewhere = self._seen.elsewhere(now, limits.silent_seconds - TOGETHER_SECONDS)
                if len(elsewhere) > 1 and all(elsewhere.values()):
                    found.append(self._anomaly("isolated", 0, now, since, ends=True))
                    break
                note = EITHER_END if len(elsewhere) == 1 else ""
                found.append(self._anomaly("silent", rank, now, since, ends=True, note=note))
            elif report.process == "stopped" and not all_stopped:
                stood = min(report.process_seconds + since, now - self._resumed)
                if stood >= limits.stopped_seconds:
                    ends = stood >= limits.silent_seconds
                    found.append(self._anomaly("stopped", rank, now, stood, ends=ends))
        return found

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
        report = self._seen.by_rank[rank].report
        inside = call = self._seen.inside(report)
        if call is None:
            waited = [one for one, _, lacking in self._seen.waits(now) if rank in lacking]
            call = max(waited, key=lambda one: one.seconds, default=None)
        collective = "" if call is None else self._seen.said_of(call, rank)
        words = report.words if kind == "failed" else note
        return Anomaly(
            kind, rank, report.host, collective, inside is not None, report.place, seconds, ends,
            note=words,
        )  # fmt: skip

    # Who is late

    def _late(self, now: float) -> list[Anomaly]:
        worst: dict[int, tuple[float, OpenCall]] = {}
        for call, seconds, lacking in self._seen.waits(now):
            for rank in lacking:
                if seconds > worst.get(rank, (0.0, call))[0]:
                    worst[rank] = (seconds, call)
        found, circles = [], self._seen.in_circles(now, self._limits.late_seconds)
        for rank, (waited, call) in worst.items():
            seconds = min(waited, now - self._resumed)
            seen = self._seen.by_rank[rank]
            report = seen.report
            # One that lives may be in the call, or enter it yet: nobody watches it any more.
            gone = report.left == ENDED and report.process == "dead"
            if gone and seconds > self._limits.stopped_seconds:
                found.append(self._anomaly("left", rank, now, seconds, ends=True))
            inside = self._seen.inside(report) is not None and rank not in circles
            if report.left or report.process != "running" or inside:
                continue  # it is named by another rule, or waits for others that do not for it
            patience = PATIENCE if seen.busy or call.sequence < FIRST_CALLS else 1.0
            if seconds >= self._limits.late_seconds * patience:
                note = "it holds the interpreter's lock" if seen.held else ""
                if rank in circles:
                    own = self._seen.said_of(circles[rank], rank)
                    note = f"it waits in {own}, and in a circle others wait for it"
                found.append(
                    Anomaly(
                        "late", rank, report.host, self._seen.said_of(call, rank), False,
                        report.place, seconds, ends=False, note=note,
                    )
                )  # fmt: skip
        return found

    def _apart(self, now: float) -> list[Anomaly]:
        """Ranks that are in different calls where all should be in the same one."""
        found, late = [], self._limits.late_seconds
        for waited, calls in self._seen.apart(now, late):
            seconds = min(waited, now - self._resumed)
            (rank, call), (peer, other) = calls[0], calls[-1]
            processes = {self._seen.by_rank[one].report.process for one, _ in calls}
            if seconds < late or processes != {"running"}:
                continue
            found.append(
                Anomaly(
                    "apart", rank, self._seen.host(rank), self._seen.said_of(call, rank), True,
                    self._seen.by_rank[rank].report.place, seconds, ends=False, peer=peer,
                    peer_host=self._seen.host(peer),
                    peer_collective=self._seen.said_of(other, peer),
                )
            )  # fmt: skip
        return found

    # Who is slow

    def _slow(self) -> list[Anomaly]:
        found, least = [], self._limits.slow_share
        for group in self._seen.groups.values():
            before, slow = group.named, group.slow(least)
            if slow is not None:
                self._named.discard(("slow", before, False, ""))
            if slow is not None and slow.rank in self._seen.by_rank:
                report = self._seen.by_rank[slow.rank].report
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
            rank, peer = (peer if found.port == IN else rank), -1
        hosts, by_rank = [self._seen.host(one) for one in (rank, peer)], self._seen.by_rank
        kind, between, ends = "slow port" if found.port else "slow link", "", [rank, peer]
        if found.groups:
            kind, ends = "slow block", [one for group in found.groups for one in group]
            where = [[self._seen.host(one) for one in group] for group in found.groups]
            between = between_groups(found.groups, where, one_way=found.one_way)
        starving = {one: self._starving(one, 0.5, by_rank) for one in ends if one in by_rank}
        whose = [f"rank {one}: " * bool(between) + said for one, said in starving.items() if said]
        return Anomaly(
            kind, rank, hosts[0], f"send {found.since}", False, "", found.seconds, ends=False,
            note="; ".join(filter(None, [found.note, *whose[:2]])), peer=peer, peer_host=hosts[1],
            port=found.port, rate=found.rate, usual_rate=found.usual_rate, between=between,
        )  # fmt: skip

    def _starving(self, rank: int, share: float, members: Iterable[int]) -> str:
        """That other programs have the processors of a slow rank, where that is why it is slow.

        That is so where it waited for a processor for so much longer than the others did. It is
        said once of a rank, as it comes and goes.
        """
        seen = self._seen.by_rank
        known = {one: seen[one].report.starved for one in members if one in seen}
        usual = statistics.median(part for one, part in known.items() if one != rank)
        if known[rank] - usual < share / 2:
            return ""
        return (
            f"other programs have its processor {known[rank]:.0%} of the time, those of the "
            f"others {usual:.0%}; it is not named for that again"
        )
