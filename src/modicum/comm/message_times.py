"""How long messages of one size travel over a link, of what they took before.

A message under way for long may have waited for the rank that sends it, or for the one that
receives it. Both are taken away without a comparison of clocks. From one message to the next pass,
at its source, some seconds between begins of sends; at its target, some seconds between ends of
receives. The second are more than the first by as much as the later message took longer, counted
from its send on. Counted from the receive on it took as long as the receive. It travels once both
stand there: the smaller of the two is how long. What it took in the first place is known of a
message whose sender did not come last: the shortest receive of the past.

Nothing here imports torch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

SLOWER = 2.0  # times as long as before, and as much more than other links are
LEAST = 12  # messages; of eight one may be an exception
LEAST_SECONDS = 1.0  # for which it must last
LEAST_DELAY = 0.002  # seconds of a message, below which nothing is worth a word
MOST, HISTORY = 256, 128  # messages that are looked at, and those before
USUAL = 0.9  # quantile of what messages took before


@dataclass(frozen=True)
class TimedMessage:
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
class UsualTimes:
    """What messages of a size took in the past: `base` of the shortest receive, at `lag`.

    Args:
        usual, typical: a high quantile and the median of what they took at most.
        least: the median of what they took at least.
    """

    lag: float
    base: float
    usual: float = math.inf
    typical: float = math.inf
    least: float = 0.0

    def at_most(self, message: TimedMessage) -> float:
        """How long a message travelled, in seconds."""
        return min(message.took, self._since_sent(message))

    def at_least(self, message: TimedMessage) -> float:
        """When a message came for which its target did not wait, the target does not know."""
        return self.at_most(message) if message.waited >= LEAST_DELAY else message.waited

    def _since_sent(self, message: TimedMessage) -> float:
        return self.base + max(0.0, message.ended - message.begun - self.lag)


@dataclass(frozen=True)
class Pace:
    """How long the last messages of a link took, in times of those before.

    Args:
        times: of all that are looked at, `lately` of the last ones alone.
        at_most: more than that they have not taken; one for which nobody waited may have taken
            long, now or before.
    """

    slow: bool
    times: float
    lately: float
    at_most: float
    seconds: float
    usual: float
    first: TimedMessage
    last: TimedMessage


class MessageTimes:
    """The messages of one size on a link."""

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.messages = deque[TimedMessage](maxlen=MOST + HISTORY)
        self.held: UsualTimes | None = None  # from before it was called slow

    def pace(self) -> Pace | None:
        """How long the last ones took; None: of too few, or of too short a time."""
        known = list(self.messages)
        count = _enough(known)
        if not count:
            return None
        last, earlier = known[-count:], known[-count - HISTORY : -count]
        if (before := self.held) is None:
            if len(earlier) < 2 * LEAST:
                return None
            before = _usual(earlier)
        took = [before.at_least(message) for message in last]
        least = max(SLOWER * before.typical, before.usual + LEAST_DELAY)
        late = [message for message, each in zip(last, took, strict=True) if each > least]
        usual = max(before.typical, 1e-6)
        median = statistics.median(took)
        return Pace(
            slow=len(late) >= count - count // LEAST,
            times=median / usual,
            lately=statistics.median(took[-LEAST // 2 :]) / usual,
            at_most=statistics.median(map(before.at_most, last)) / max(before.least, 1e-6),
            seconds=median,
            usual=usual,
            first=late[0] if late else last[0],
            last=last[-1],
        )

    def hold(self) -> None:
        """Compare with what was before, from here on."""
        known = list(self.messages)
        count = _enough(known)
        if count and (earlier := known[-count - HISTORY : -count]):
            self.held = _usual(earlier)


def _usual(messages: list[TimedMessage]) -> UsualTimes:
    lag = min(one.ended - one.begun for one in messages)
    base = min(one.took for one in messages)
    rough = UsualTimes(lag, base)
    took = sorted(rough.at_most(one) for one in messages)
    high, least = took[math.floor(USUAL * len(took))], map(rough.at_least, messages)
    return UsualTimes(lag, base, high, statistics.median(took), statistics.median(least))


def _enough(messages: list[TimedMessage]) -> int:
    """How many of the last messages last long enough, from the begin of the first; 0: they don't.

    >>> each = [TimedMessage(n, n / 4, n / 4, 0.25, 0.25) for n in range(20)]
    >>> _enough(each), _enough(each[:11])
    (12, 0)
    """
    for count in range(LEAST, min(MOST, len(messages)) + 1):
        first = messages[-count]
        if messages[-1].ended - first.ended + first.took >= LEAST_SECONDS:
            return count
    return 0
