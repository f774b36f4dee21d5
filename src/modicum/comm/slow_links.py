"""Which link between two ranks is slow, by what was sent over it from one to the other.

In a ring every rank is as slow as the slowest link, so how long a rank waits says nothing, and how
long a message travelled does (`message_times`). Which are slow together, `link_patterns` says.
Nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from modicum.comm.link_patterns import BOTH, Ends, LinkMatrix, LinkPattern, RankGroup
from modicum.comm.message_times import LEAST, SLOWER, MessageTimes, Pace, TimedMessage
from modicum.core.ranks.observed_calls import SEND
from modicum.core.ranks.rank_reports import DoneCall

FIRST = 8  # messages of a link: what is connected, and warmed up
FEW = 3  # messages after which a link is looked at again
MOST_SIZES, MOST_PENDING = 8, 2048
NO_MORE = (1 + SLOWER) / 2  # times as long as before: what takes less is not slow
STUCK = 30.0  # times as long as the longest message before, after which one will not come


@dataclass(frozen=True)
class SlowLink:
    """A link that has become slow, or all links of a port or between groups of ranks.

    Args:
        source, target: who sends over the link, and who receives; of several the one that was found
            first.
        port: `out` where all links out of `source` are slow, `in` where all into `target` are,
            `out and in` where both are of `source`; else empty.
        groups: ranks between which all links are slow; where they are `one_way`, from the first
            to the second.
        rate: bytes a second, and the `usual_rate` before.
        since: the number of its first slow message, which the link has counted, and `seconds` since
            then.
        note: which end it may be, where that is not known.
    """

    source: int
    target: int
    port: str
    rate: float
    usual_rate: float
    since: int
    seconds: float
    note: str
    groups: tuple[RankGroup, ...] = ()
    one_way: bool = False


class _Link:
    """The messages from one rank to another, as each end tells of them."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target, self.named = source, target, False
        self._pending: tuple[dict[int, DoneCall], dict[int, DoneCall]] = ({}, {})
        self._origin: tuple[float, float] | None = None
        self._sizes: dict[int, MessageTimes] = {}
        self._fresh = 0
        self._pace: Pace | None = None
        self.paced: MessageTimes | None = None  # the size that its pace is of

    def done(self, call: DoneCall) -> bool:
        """An end of a message; whether the link is worth another look."""
        own, other = self._pending if call.kind == SEND else self._pending[::-1]
        if call.sequence not in other:
            own[call.sequence] = call
            if len(own) > MOST_PENDING:  # the other end was written over
                del own[min(own)]
            return False
        ends = (call, other.pop(call.sequence))
        sent, come = ends if call.kind == SEND else ends[::-1]
        if sent.sequence < FIRST or sent.marked or come.marked:
            return False
        begun = sent.ended - sent.seconds
        if self._origin is None:
            self._origin = (begun, come.ended)
        if sent.bytes not in self._sizes:
            if len(self._sizes) == MOST_SIZES:
                del self._sizes[min(self._sizes)]
            self._sizes[sent.bytes] = MessageTimes(sent.bytes)
        self._sizes[sent.bytes].messages.append(
            TimedMessage(
                sent.sequence, begun - self._origin[0], come.ended - self._origin[1],
                come.seconds, come.waited,
            )
        )  # fmt: skip
        self._fresh += 1
        return self._fresh >= FEW

    def begin_anew(self) -> None:
        """Forget that it was slow, and what was before."""
        self.named, self._pace, self.paced = False, None, None
        self._sizes.clear()

    @property
    def ends(self) -> Ends:
        """Who sends over it, and who receives."""
        return self.source, self.target

    @property
    def longest(self) -> float:
        """Seconds that a message has taken at most, of those that are known; 0: of few."""
        took = [one.took for size in self._sizes.values() for one in size.messages]
        return max(took) if len(took) >= LEAST else 0.0

    def times_as_large(self, size: int) -> float:
        """How many times as large a message is as the largest of those that are known."""
        return size / max(1, max(self._sizes, default=size))

    def size_of(self, sequence: int) -> int:
        """Bytes of a message that its source has sent; else of all that are known, if alike."""
        if (sent := self._pending[0].get(sequence)) is not None:
            return sent.bytes
        return next(iter(self._sizes)) if len(self._sizes) == 1 else 0

    def heaviest(self) -> MessageTimes | None:
        """The size of which most bytes travel."""
        return max(self._sizes.values(), key=lambda s: s.bytes * len(s.messages), default=None)

    def pace(self) -> Pace | None:
        if self._fresh >= FEW:
            self.paced, self._fresh = self.heaviest(), 0
            self._pace = None if self.paced is None else self.paced.pace()
        return self._pace


@dataclass(frozen=True)
class _Times:
    """As long as before that a link takes, or longer; 1 where that is not known."""

    ends: Ends
    times: float
    is_known: bool


class LinkMessages:
    """The messages of all links."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._fresh = False

    def done(self, ends: tuple[int, ...], call: DoneCall) -> None:
        """A message has left its source, or come to its target, which are the two `ends`."""
        if call.group not in self._links:
            source, target = ends
            self._links[call.group] = _Link(source, target)
        self._fresh = self._links[call.group].done(call) or self._fresh

    def patience(self, name: str, size: int) -> float:
        """Seconds after which a message of so many bytes will not come any more; 0: not known."""
        link = self._links.get(name)
        return 0.0 if link is None else STUCK * link.longest * max(1.0, link.times_as_large(size))

    def size_of(self, name: str, sequence: int) -> int:
        """Bytes of a message that has left and not come, or of all before it; 0: not known."""
        link = self._links.get(name)
        return 0 if link is None else link.size_of(sequence)

    def slow(self) -> list[SlowLink]:
        """Links that have become slow since this was last asked; one may again when it was fast."""
        if not self._fresh:
            return []
        self._fresh = False
        paces = {
            name: pace for name, link in self._links.items() if (pace := link.pace()) is not None
        }
        for name, pace in paces.items():
            if self._links[name].named and pace.times < NO_MORE:
                self._links[name].begin_anew()
        fresh = [name for name, pace in paces.items() if pace.slow and not self._links[name].named]
        return self._new(fresh, paces) if fresh else []

    def _new(self, fresh: Iterable[str], paces: Mapping[str, Pace]) -> list[SlowLink]:
        """What is slow of the links that are and have no name yet: more than the others are."""
        slow = {name for name, pace in paces.items() if pace.slow or pace.lately >= NO_MORE}
        known, every = dict[Ends, list[str]](), list[_Times]()
        for name, pace in paces.items():
            ends = self._links[name].ends
            is_known = name in slow or pace.at_most < NO_MORE
            every.append(_Times(ends, max(1.0, pace.times), is_known))
            if is_known:
                known.setdefault(ends, []).append(name)
        all_slow = [ends for ends, names in known.items() if slow.issuperset(names)]
        matrix, found = LinkMatrix(known, all_slow, (one.ends for one in every)), []
        for name in fresh:
            link, pace = self._links[name], paces[name]
            for pattern in () if link.named else matrix.of(link.ends):
                if _more_than_others(link.ends, pace.times, pattern, every, matrix.within):
                    alone = pattern == matrix.alone(link.ends)
                    same = [one for ends in pattern.links for one in known[ends]]
                    for one in [name] if alone else same:
                        self._name(self._links[one])
                    note = _note(link.ends, matrix) if alone else ""
                    found.append(self._finding(name, pace, pattern, note))
                    break
        return found

    @staticmethod
    def _name(link: _Link) -> None:
        if link.paced is not None and not link.named:
            link.named = True
            link.paced.hold()

    def _finding(self, name: str, pace: Pace, pattern: LinkPattern, note: str) -> SlowLink:
        link = self._links[name]
        size = link.paced
        assert size is not None
        source, target = link.ends
        if pattern.port == BOTH and target == pattern.rank:
            source, target = target, source
        seconds = max(0.0, pace.last.ended - pace.first.ended + pace.seconds)
        return SlowLink(
            source, target, pattern.port, size.bytes / max(pace.seconds, 1e-9),
            size.bytes / pace.usual, pace.first.sequence, seconds, note, pattern.groups,
            pattern.one_way,
        )  # fmt: skip


def _note(ends: Ends, matrix: LinkMatrix) -> str:
    """Which end of a slow link it may be, and whether more than it may be slow."""
    source, target = ends
    sends, receives = matrix.of_end(source, 0) - {ends}, matrix.of_end(target, 1) - {ends}
    fast_out, fast_in = matrix.are_fast(sends), matrix.are_fast(receives)
    if fast_out and fast_in:
        note = "on their other links both are as fast as before"
    elif fast_out:
        note = f"rank {source} sends as fast as before to others"
    elif fast_in:
        note = f"rank {target} receives as fast as before from others"
    else:
        note = "which end of it is at fault is not known, as "
        if not sends | receives:
            note += "neither has another in that direction"
        elif (sends | receives) & matrix.slow:
            note += "other links of theirs are slow, too"
        else:
            note += "nobody waits for what comes over their other links"
    if len(matrix.loose) > 1:
        note += f"; {len(matrix.loose)} links are slow at once, for one reason or for several"
    return note


def _more_than_others(
    ends: Ends, times: float, pattern: LinkPattern, every: Sequence[_Times], within: Set[Ends]
) -> bool:
    """Whether a link has become slow, and others that the same fault leaves as they are have not.

    That is the median of the links that share no end with it; or of all that the fault does not
    explain; or, as these may be few, of those within groups of ranks between which all are slow.
    Links of which nothing is known count as they were before, and not where several are said to be
    slow.

    Args:
        times, every: as long as before that it takes, and each link.
        within: the links within such groups.
    """
    bar, alone = times / SLOWER, len(pattern.links) == 1
    apart = [e for e in every if e.ends[0] != ends[0] and e.ends[1] != ends[1]]
    if not apart:
        return True
    if min(each.times for each in every) > bar:
        return False
    unexplained = [each for each in every if each.ends not in pattern.links]
    inner = [each for each in every if each.ends in within]
    for group in (apart, unexplained, inner):
        compared = [each.times for each in group if each.is_known or alone]
        if compared and statistics.median(compared) <= bar:
            return True
    return False
