"""What is known of all ranks, by what each says of its calls: who is in one, and who lacks it.

Only durations and numbers of calls are compared, never the clocks of two ranks. Nothing here
imports torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from modicum.comm.slow_links import LinkMessages
from modicum.comm.slowness import GroupCalls
from modicum.core.ranks.call_ring import ENDED
from modicum.core.ranks.observed_calls import MESSAGES, RECEIVE, SEND, is_link
from modicum.core.ranks.rank_reports import MOST_GROUPS, DoneCall, OpenCall, RankReport

# Without a sign of any thread: one of them holds the interpreter's lock, or a debugger all of them.
HELD_SECONDS = 2.0


@dataclass
class SeenRank:
    """A rank's last report, and when it came."""

    report: RankReport
    when: float

    @property
    def dead_for(self) -> float:
        """Seconds since its process died; less than 0: it lives."""
        return self.report.process_seconds if self.report.process == "dead" else -1.0

    @property
    def held(self) -> bool:
        """Whether no thread of it gives a sign, as where one holds the interpreter's lock."""
        return self.report.beat_seconds >= HELD_SECONDS

    @property
    def busy(self) -> bool:
        """Whether it is held, or marked as in no ordinary step."""
        return self.report.marked or self.held


class SeenRanks:
    """Takes reports of all ranks, in any order.

    Attributes:
        by_rank: what came last of those of whom anything has.
        groups, messages: calls of each process group; messages of each link.
    """

    def __init__(self) -> None:
        self.by_rank: dict[int, SeenRank] = {}
        self.groups: dict[str, GroupCalls] = {}
        self.messages = LinkMessages()
        # By rank the seconds that it has waited for messages; by group and rank how many of these
        # were before the last call.
        self._waited = defaultdict[int, float](float)
        self._waited_before: dict[tuple[str, int], float] = {}

    def add(self, reports: Iterable[RankReport], now: float) -> None:
        """Take what came in at `now`."""
        for report in reports:
            self.by_rank[report.rank] = SeenRank(report, now)
            for name, members in report.members.items():
                known = self.groups.get(name)
                if known is None or known.members != members:
                    self.groups[name] = GroupCalls(members)
            for call in report.done:
                self._done(report.rank, call)

    def _done(self, rank: int, call: DoneCall) -> None:
        """A call has ended at a rank; what it waited for messages before counts as in the call.

        So a rank that comes late since a link is slow, or since another one is, is not slow itself.
        """
        if (group := self.groups.get(call.group)) is None:
            return
        if call.kind in MESSAGES:
            if len(group.members) == 2:
                self._waited[rank] += call.waited
                self.messages.done(group.members, call)
            return
        key, waited = (call.group, rank), self._waited[rank]
        apart = waited - self._waited_before.get(key, waited)
        self._waited_before[key] = waited
        group.done(rank, replace(call, seconds=call.seconds + apart) if apart else call)

    def host(self, rank: int) -> str:
        """The host of a rank; empty where nothing is known of it, as of rank -1, which is none."""
        return self.by_rank[rank].report.host if rank in self.by_rank else ""

    def heard(self, now: float) -> None:
        """Nobody listened until `now`, so that nothing was heard says nothing."""
        for seen in self.by_rank.values():
            seen.when = now

    def elsewhere(self, now: float, silent: float) -> dict[str, bool]:
        """Hosts other than rank 0's, and whether nothing was heard of them for so many seconds."""
        here = self.by_rank[0].report.host if 0 in self.by_rank else None
        return {
            seen.report.host: now - seen.when >= silent
            for seen in self.by_rank.values()
            if seen.report.host != here
        }

    def inside(self, report: RankReport) -> OpenCall | None:
        """The first call that a rank is in, but for those that have ended at another.

        That one of those has ended here too, no thread of the rank has come to say.
        """
        for call in sorted(report.open, key=lambda one: (one.kind not in MESSAGES, one.sequence)):
            group = self.groups.get(call.group)
            through = group.through.items() if group else ()
            if all(count <= call.sequence for rank, count in through if rank != report.rank):
                return call
        return None

    def waits(self, now: float) -> list[tuple[OpenCall, float, list[int]]]:
        """Calls in which some rank is, for how long, and who has not issued them.

        Not of ranks that ended in order: what is open there as they end, they have given up.
        """
        found = []
        for seen in self.by_rank.values():
            for call in seen.report.open if seen.report.left != ENDED else ():
                group = self.groups.get(call.group)
                members = group.members if group else ()
                lacking = [rank for rank in members if self.lacks(rank, call)]
                if lacking:
                    found.append((call, call.seconds + now - seen.when, lacking))
        return found

    def lacks(self, rank: int, call: OpenCall) -> bool:
        """Whether a rank has not begun a call; of too many links it does not say."""
        if (seen := self.by_rank.get(rank)) is None:
            return False
        begun = seen.report.entered.get(call.group)
        if begun is None:
            return not is_link(call.group) or len(seen.report.entered) < MOST_GROUPS
        return begun <= call.sequence

    def travelling(self) -> Iterator[OpenCall]:
        """Messages that an end waits for, and that the other has begun; threads of both run."""
        for seen in self.by_rank.values():
            for call in seen.report.open:
                group = self.groups.get(call.group)
                if call.kind not in MESSAGES or group is None or len(group.members) != 2:
                    continue
                ends = [self.by_rank.get(rank) for rank in group.members]
                ordinary = all(
                    end and end.report.process == "running" and not end.busy for end in ends
                )
                if ordinary and not any(self.lacks(rank, call) for rank in group.members):
                    yield call

    def size_of(self, call: OpenCall) -> int:
        """Bytes of a message that travels, as either end says; 0: not known."""
        said = [
            one.bytes
            for seen in self.by_rank.values()
            for one in (*seen.report.open, *seen.report.unawaited)
            if (one.group, one.sequence) == (call.group, call.sequence)
        ]
        return max(said, default=0) or self.messages.size_of(call.group, call.sequence)

    def apart(self, now: float, least: float) -> list[tuple[float, list[tuple[int, OpenCall]]]]:
        """Calls of one number in a group that are of several kinds at its ranks, and for how long.

        Those never end. Ranks of one kind are together, the rarest first; `least` are seconds.
        """
        same: dict[tuple[str, int], list[tuple[int, OpenCall, float]]] = defaultdict(list)
        for rank, seen in self.by_rank.items():
            for call in seen.report.open:
                seconds = call.seconds + now - seen.when
                if call.kind not in MESSAGES and seconds >= least:
                    same[call.group, call.sequence].append((rank, call, seconds))
        found = []
        for calls in same.values():
            count = Counter(call.kind for _, call, _ in calls)
            if len(count) > 1:
                calls.sort(key=lambda one: (count[one[1].kind], one[1].kind, one[0]))
                seconds = min(each for _, _, each in calls)
                found.append((seconds, [(rank, call) for rank, call, _ in calls]))
        return found

    def in_circles(self, now: float, least: float) -> dict[int, OpenCall]:
        """Ranks that wait for one another in a circle, each with a call that it waits in.

        Waits of fewer seconds than `least` are none.
        """
        waits: dict[int, dict[int, OpenCall]] = {}  # for whom, in which call
        for rank, seen in self.by_rank.items():
            for call in seen.report.open:
                group = self.groups.get(call.group)
                if group is None or call.seconds + now - seen.when < least:
                    continue
                lacking = (one for one in group.members if one != rank and self.lacks(one, call))
                waits.setdefault(rank, {}).update(dict.fromkeys(lacking, call))
        circles = {}
        for rank in waits:
            if (first := _first_step(waits, rank)) is not None:
                circles[rank] = waits[rank][first]
        return circles

    def said_of(self, call: OpenCall, rank: int) -> str:
        """A call of a rank, for people: `all-gather 5124 of layers.17`, `send 12 to rank 3`."""
        label = f" of {call.label}" if call.label else ""
        group = self.groups.get(call.group)
        if call.kind not in MESSAGES or group is None or len(group.members) != 2:
            return f"{call.kind} {call.sequence}{label}"
        source, target = group.members
        kind, end = (
            (SEND, f"to rank {target}") if rank == source else (RECEIVE, f"from rank {source}")
        )
        return f"{kind} {call.sequence} {end}{label}"


def _first_step(waits: Mapping[int, Mapping[int, OpenCall]], rank: int) -> int | None:
    """For whom a rank waits on a way that leads back to it; None: no way does.

    >>> call = OpenCall("0", 1, "barrier", "", 9.0)
    >>> [_first_step({0: {1: call}, 1: {2: call}, 2: {1: call}}, rank) for rank in range(3)]
    [None, 2, 1]
    """
    for first in waits.get(rank, {}):
        seen, ahead = {first}, [first]
        while ahead:
            further = set(waits.get(ahead.pop(), {})) - seen
            if rank in further:
                return first
            seen |= further
            ahead += further
    return None
