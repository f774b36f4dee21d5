"""Which link between two ranks is slow, by what was sent over it from one to the other.

In a ring every rank is as slow as the slowest link, so how long a rank waits says nothing: a
message under way for long may have waited for the rank that sends it, or for the one that receives
it. Both are taken away without a comparison of clocks. From one message to the next pass, at its
source, some seconds between begins of sends; at its target, some seconds between ends of receives.
The second are more than the first by as much as the later message took longer, counted from its
send on. Counted from the receive on it took as long as the receive. It travels once both stand
there: the smaller of the two is how long. What it took in the first place is known of a message
whose sender did not come last: the shortest receive of the past.

Nothing here imports torch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from modicum.core.ranks.observed_calls import SEND
from modicum.core.ranks.rank_reports import DoneCall

SLOWER = 2.0  # times as long as before, and as much more than other links are
FIRST = 8  # messages of a link: what is connected, and warmed up
LEAST = 12  # messages; of eight one may be an exception
LEAST_SECONDS = 1.0  # for which it must last
LEAST_DELAY = 0.002  # seconds of a message, below which nothing is worth a word
MOST, HISTORY = 256, 128  # messages that are looked at, and those before
FEW = 3  # messages after which a link is looked at again
MOST_SIZES, MOST_PENDING = 8, 2048
STUCK = 30.0  # times as long as the longest message before, after which one will not come
USUAL = 0.9  # quantile of what messages took before


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


@dataclass(frozen=True)
class _Message:
    """A message of which both ends are known; each time is since the link's first one, there.

    Args:
        begun: when its send began, on the source's clock.
        ended: when it was received, on the target's.
        took: seconds from the begin of the receive, for `waited` of which the target waited.
    """

    sequence: int
    begun: float
    ended: float
    took: float
    waited: float


@dataclass(frozen=True)
class _Before:
    """What messages of a size took in the past: `base` of the shortest receive, at `lag`."""

    lag: float
    base: float
    usual: float
    typical: float

    def at_most(self, message: _Message) -> float:
        return min(message.took, self._since_sent(message))

    def at_least(self, message: _Message) -> float:
        """When a message came for which its target did not wait, the target does not know."""
        return self.at_most(message) if message.waited >= LEAST_DELAY else message.waited

    def _since_sent(self, message: _Message) -> float:
        return self.base + max(0.0, message.ended - message.begun - self.lag)


@dataclass(frozen=True)
class _Pace:
    """How long the last messages of a link took, in times of those before.

    Args:
        times: of all that are looked at, `lately` of the last ones alone.
    """

    slow: bool
    times: float
    lately: float
    seconds: float
    usual: float
    first: _Message
    last: _Message


class _Size:
    """The messages of one size on a link."""

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.messages = deque[_Message](maxlen=MOST + HISTORY)
        self.held: _Before | None = None  # from before it was called slow

    def pace(self) -> _Pace | None:
        known = list(self.messages)
        count = _enough(known)
        if not count:
            return None
        last, earlier = known[-count:], known[-count - HISTORY : -count]
        if (before := self.held) is None:
            if len(earlier) < 2 * LEAST:
                return None
            before = _before(earlier)
        took = [before.at_least(message) for message in last]
        least = max(SLOWER * before.typical, before.usual + LEAST_DELAY)
        late = [message for message, each in zip(last, took, strict=True) if each > least]
        usual = max(before.typical, 1e-6)
        median = statistics.median(took)
        return _Pace(
            slow=len(late) >= count - count // LEAST,
            times=median / usual,
            lately=statistics.median(took[-LEAST // 2 :]) / usual,
            seconds=median,
            usual=usual,
            first=late[0] if late else last[0],
            last=last[-1],
        )

    def hold(self) -> None:
        """Compare with what was before, from here on."""
        known = list(self.messages)
        count = _enough(known)
        self.held = _before(known[-count - HISTORY : -count])


class _Link:
    """The messages from one rank to another, as each end tells of them."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target, self.named = source, target, False
        self._pending: tuple[dict[int, DoneCall], dict[int, DoneCall]] = ({}, {})
        self._origin: tuple[float, float] | None = None
        self._sizes: dict[int, _Size] = {}
        self._fresh = 0
        self._pace: _Pace | None = None

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
            self._sizes[sent.bytes] = _Size(sent.bytes)
        self._sizes[sent.bytes].messages.append(
            _Message(
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

    def heaviest(self) -> _Size | None:
        """The size of which most bytes travel."""
        return max(self._sizes.values(), key=lambda s: s.bytes * len(s.messages), default=None)

    def pace(self) -> _Pace | None:
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

    def patience(self, name: str) -> float:
        """Seconds after which a message that travels will not come any more; 0: not known."""
        link = self._links.get(name)
        return 0.0 if link is None else STUCK * link.longest

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

    def _extent(self, name: str, paces: Mapping[str, _Pace]) -> tuple[str, list[str]]:
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

    def _finding(self, name: str, pace: _Pace, port: str, paces: Mapping[str, _Pace]) -> SlowLink:
        link = self._links[name]
        size = link.heaviest()
        assert size is not None
        note = "" if port else self._note(name, paces)
        seconds = max(0.0, pace.last.ended - pace.first.ended + pace.seconds)
        return SlowLink(
            link.source, link.target, port, size.bytes / max(pace.seconds, 1e-9),
            size.bytes / pace.usual, pace.first.sequence, seconds, note,
        )  # fmt: skip

    def _note(self, name: str, paces: Mapping[str, _Pace]) -> str:
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


def _before(messages: list[_Message]) -> _Before:
    lag = min(one.ended - one.begun for one in messages)
    base = min(one.took for one in messages)
    rough = _Before(lag, base, math.inf, math.inf)
    took = sorted(rough.at_most(one) for one in messages)
    return _Before(lag, base, took[math.floor(USUAL * len(took))], statistics.median(took))


def _enough(messages: list[_Message]) -> int:
    """How many of the last messages last long enough, from the begin of the first; 0: they don't.

    >>> each = [_Message(n, n / 4, n / 4, 0.25, 0.25) for n in range(20)]
    >>> _enough(each), _enough(each[:11])
    (12, 0)
    """
    for count in range(LEAST, min(MOST, len(messages)) + 1):
        first = messages[-count]
        if messages[-1].ended - first.ended + first.took >= LEAST_SECONDS:
            return count
    return 0
