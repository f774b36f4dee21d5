"""Which link between two ranks is slow, by what was sent over it from one to the other.

In a ring every rank is as slow as the slowest link, so how long a rank waits says nothing, and how
long a message travelled does (`message_times`). Nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from modicum.comm.message_times import LEAST, SLOWER, MessageTimes, Pace, TimedMessage
from modicum.core.ranks.observed_calls import SEND
from modicum.core.ranks.rank_reports import DoneCall

FIRST = 8  # messages of a link: what is connected, and warmed up
FEW = 3  # messages after which a link is looked at again
MOST_SIZES, MOST_PENDING = 8, 2048
STUCK = 30.0  # times as long as the longest message before, after which one will not come


@dataclass(frozen=True)
class SlowLink:
    """A link that has become slow, or a port of which all links in a direction have.

    Args:
        source, target: who sends over the link, and who receives; of a port the link that was
            found first.
        port: `out` where all links out of `source` are slow, `in` where all into `target` are, and
            empty where it is this link.
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


class _Link:
    """The messages from one rank to another, as each end tells of them."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target, self.named = source, target, False
        self._pending: tuple[dict[int, DoneCall], dict[int, DoneCall]] = ({}, {})
        self._origin: tuple[float, float] | None = None
        self._sizes: dict[int, MessageTimes] = {}
        self._fresh = 0
        self._pace: Pace | None = None

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
        self.named, self._pace = False, None
        self._sizes.clear()

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
            size, self._fresh = self.heaviest(), 0
            self._pace = None if size is None else size.pace()
        return self._pace


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
        found = []
        for name, pace in paces.items():
            link = self._links[name]
            if link.named and pace.times < (1 + SLOWER) / 2:
                link.begin_anew()
            if link.named or not pace.slow:
                continue
            others = [
                paces[other].times
                for other in paces
                if self._links[other].source != link.source
                and self._links[other].target != link.target
            ]
            if others and pace.times < SLOWER * statistics.median(others):
                continue
            port, names = self._extent(name, paces)
            for one in names:
                self._name(self._links[one])
            found.append(self._finding(name, pace, port, paces))
        return found

    @staticmethod
    def _name(link: _Link) -> None:
        size = link.heaviest()
        if size is not None and not link.named:
            link.named = True
            size.hold()

    def _extent(self, name: str, paces: Mapping[str, Pace]) -> tuple[str, list[str]]:
        """Whether all links of a port are slow, and which; else the link alone."""
        for port in ("out", "in"):
            same = self._of_port(name, port, paces)
            if len(same) > 1 and all(paces[one].lately >= (1 + SLOWER) / 2 for one in same):
                return port, same
        return "", [name]

    def _of_port(self, name: str, port: str, names: Iterable[str]) -> list[str]:
        """The links out of a link's source, or into its target."""
        link = self._links[name]
        ends = {one: (self._links[one].source, self._links[one].target) for one in names}
        end = 0 if port == "out" else 1
        wanted = (link.source, link.target)[end]
        far = [one for one, both in ends.items() if both[end] == wanted]
        return far if len({ends[one][1 - end] for one in far}) > 1 else [name]

    def _finding(self, name: str, pace: Pace, port: str, paces: Mapping[str, Pace]) -> SlowLink:
        link = self._links[name]
        size = link.heaviest()
        assert size is not None
        note = "" if port else self._note(name, paces)
        seconds = max(0.0, pace.last.ended - pace.first.ended + pace.seconds)
        return SlowLink(
            link.source, link.target, port, size.bytes / max(pace.seconds, 1e-9),
            size.bytes / pace.usual, pace.first.sequence, seconds, note,
        )  # fmt: skip

    def _note(self, name: str, paces: Mapping[str, Pace]) -> str:
        """Which end of a slow link it may be."""
        link = self._links[name]
        sends, receives = (len(self._of_port(name, port, paces)) > 1 for port in ("out", "in"))
        if sends and receives:
            return "on their other links both are as fast as before"
        if sends:
            return f"rank {link.source} sends as fast as before to others"
        if receives:
            return f"rank {link.target} receives as fast as before from others"
        return "which end of it is at fault is not known, as neither has another in that direction"
