"""How fast calls of updates travel, next to what the link was measured to carry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from modicum.core.machine.links import MeasuredLink
from modicum.core.ranks.observed_calls import AGREEMENT, ObservedCall
from modicum.core.ranks.ranks import Ranks

MOST_CALLS = 1000  # of an update that are kept


@dataclass(frozen=True)
class SeenLink:
    """A link as calls of updates found it.

    Args:
        slower: how many times as long as was to be expected the calls of an update were under way.
        busy: seconds for which they were, at the rank that came last.
        link: what it carries.
    """

    slower: float
    busy: float
    link: MeasuredLink


class UpdateCalls:
    """An observer that keeps the calls of updates, but for those that agree on something.

    Args:
        counts: whether calls among these ranks are of the link in question.

    >>> kept = UpdateCalls()
    >>> kept.next_update()
    >>> kept.began(ObservedCall(0, "all-reduce", "0", (0, 1), "head", 40, 0.0, 0.0))
    >>> kept.began(ObservedCall(1, "all-reduce", "0", (0, 1), AGREEMENT, 8, 0.0, 0.0))
    >>> [len(calls) for calls in kept.updates]
    [1]
    """

    def __init__(self, counts: Callable[[tuple[int, ...]], bool] = lambda members: True) -> None:
        self.updates: list[list[ObservedCall]] = []
        self._counts = counts

    def next_update(self) -> None:
        """The calls that follow are of another update."""
        self.updates.append([])

    def began(self, call: ObservedCall) -> None:
        """Keep it."""
        if not self.updates or call.label == AGREEMENT or not self._counts(call.members):
            return
        if len(self.updates[-1]) < MOST_CALLS:
            self.updates[-1].append(call)

    def changed(self, call: ObservedCall) -> None:
        """Nothing: the record is the one that is kept."""


def seen_link(
    updates: Sequence[Sequence[ObservedCall]], link: MeasuredLink, ranks: Ranks
) -> SeenLink | None:
    """What the calls of some updates say of the link that carried them; all ranks call this.

    A rank that comes late has the others wait in their calls, so of each update the rank counts
    whose calls were under way for the shortest time.

    Args:
        updates: this rank's calls, of as many updates as all others have.
        link: as it was measured.

    Returns:
        None: nothing travelled, or no update's calls have ended.
    """
    own = [_under_way(calls) for calls in updates]
    shortest = ranks.min(*own) if own else []
    rows: list[tuple[float, float, float, float]] = []
    for calls, seconds in zip(updates, shortest, strict=True):
        steps = float(sum(_steps(call) for call in calls))
        sent = float(sum(call.bytes for call in calls))
        expected = link.seconds(sent, steps)
        if sent > 0 and expected > 0 and 0 < seconds < math.inf:
            rows.append((seconds / expected, seconds, steps, sent))
    if not rows:
        return None
    seconds = sum(row[1] for row in rows)
    moving = max(seconds - link.latency * sum(row[2] for row in rows), seconds / 2)
    rate = sum(row[3] for row in rows) / moving
    found = replace(link, rate=float(f"{rate:.4g}"), when="")
    return SeenLink(median(row[0] for row in rows), median(row[1] for row in rows), found)


def _steps(call: ObservedCall) -> int:
    around = len(call.members) - 1
    return 2 * around if call.kind == "all-reduce" else around


def _under_way(calls: Iterable[ObservedCall]) -> float:
    """Seconds for which some call was under way; infinite where one has not ended."""
    total, until = 0.0, -math.inf
    for call in sorted(calls, key=lambda call: call.begun):
        if not call.done:
            return math.inf
        total += max(0.0, call.ended - max(call.begun, until))
        until = max(until, call.ended)
    return total
