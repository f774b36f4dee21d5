"""Which calls each update of a run made, and how long it waited for them, in a bounded file.

An update's calls are those that this process asks for in it: an engine may issue some of them
later, such as gathers that hide behind the next update's forward pass. A call that is still under
way when its update ends has ended, as a rule, by the end of the next one, so a row is made then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from modicum.core.ranks.observed_calls import ObservedCall

MOST_CALLS = 4000  # in all rows
MOST_OF_UPDATE = 1000  # in the row of one update


@dataclass(frozen=True)
class _UpdateCalls:
    """An update's number, when it began, how long it took, and its calls."""

    step: int
    begun: float
    seconds: float
    calls: list[ObservedCall]

    def asked_for(self, call: ObservedCall) -> bool:
        return 0 <= call.asked - self.begun <= self.seconds

    def row(self, every: int) -> dict[str, Any]:
        kept = self.calls[:MOST_OF_UPDATE]
        return {
            "step": self.step,
            "seconds": round(self.seconds, 6),
            "every": every,
            "calls": [self._call(call) for call in kept],
            "left_out": len(self.calls) - len(kept),
        }

    def _call(self, call: ObservedCall) -> dict[str, Any]:
        def since(instant: float) -> float:
            return round(instant - self.begun, 6)

        return {
            "kind": call.kind,
            "group": call.group,
            "ranks": len(call.members),
            "label": call.label,
            "bytes": call.bytes,
            "asked": since(call.asked),
            "begun": since(call.begun),
            "ended": since(call.ended) if call.done else None,
            "waited": round(call.waited, 6),
        }


class CallTimeline:
    """An observer that keeps the calls of updates, as rows of plain values.

    Of a long run it keeps those of every n-th update: n begins at 1, and triples whenever the rows
    come to hold more than `most` calls; then the updates between are dropped. So n is odd, and of
    what is sent in turns by odd and by even updates both are kept. The last update is
    kept in any case. What all updates together and what is between them sent is in each row's
    `so_far`.

    A row has `step`, `seconds` of the update, `every` (n), `calls`, how many more of them were
    `left_out`, and `so_far` (`updates`, `calls`, `bytes`, seconds `waited`). A call has what an
    `ObservedCall` has, its times in seconds since the update began.

    Args:
        rows: of the run's earlier processes.
        most: calls in all rows.
        now: gives the time, as calls are timed.

    >>> timeline = CallTimeline()
    >>> for step in (1, 2):
    ...     with timeline.update(step):
    ...         timeline.began(ObservedCall(step, "all-reduce", "0", (0, 1), "head", 40, 0.0, 0.0))
    >>> timeline.finish()
    >>> [row["so_far"]["bytes"] for row in timeline.rows]
    [40, 80]
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]] = (),
        *,
        most: int = MOST_CALLS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = list(rows)
        self.every = int(self.rows[-1]["every"]) if self.rows else 1
        self._most, self._now = most, now
        self._held = sum(1 + len(row["calls"]) for row in self.rows)
        none = {"updates": 0, "calls": 0, "bytes": 0, "waited": 0.0}
        self._so_far = dict(self.rows[-1]["so_far"]) if self.rows else none
        self._open = deque[ObservedCall]()
        self._landing: _UpdateCalls | None = None
        self._fresh: list[dict[str, Any]] = []
        self._thinned = False

    def began(self, call: ObservedCall) -> None:
        """Keep it."""
        self._open.append(call)  # atomic: a backward pass has threads of its own

    def changed(self, call: ObservedCall) -> None:
        """Nothing: the record is the one that is kept."""

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """The calls of the block are those of update number `step`."""
        self._count(self._taken())
        begun = self._now()
        yield
        seconds, calls = self._now() - begun, self._taken()
        self._land()
        self._landing = _UpdateCalls(step, begun, seconds, calls)

    def finish(self) -> None:
        """No update follows: the last one has a row too."""
        calls = self._taken()
        self._land(last=True)
        self._count(calls)

    def written(self) -> tuple[list[dict[str, Any]], bool]:
        """The rows since this was last asked, and whether earlier ones were dropped since."""
        found = (self.rows if self._thinned else self._fresh), self._thinned
        self._fresh, self._thinned = [], False
        return found

    def _taken(self) -> list[ObservedCall]:
        """The calls since this was last asked, but for those of the update that has not landed."""
        calls: list[ObservedCall] = []
        while self._open:
            call = self._open.popleft()
            if self._landing is not None and self._landing.asked_for(call):
                self._landing.calls.append(call)
            else:
                calls.append(call)
        return calls

    def _count(self, calls: Sequence[ObservedCall], updates: int = 0) -> None:
        self._so_far["updates"] += updates
        self._so_far["calls"] += len(calls)
        self._so_far["bytes"] += sum(call.bytes for call in calls)
        waited = sum(call.waited for call in calls)
        self._so_far["waited"] = round(self._so_far["waited"] + waited, 6)

    def _land(self, *, last: bool = False) -> None:
        update, self._landing = self._landing, None
        if update is None:
            return
        self._count(update.calls, updates=1)
        if update.step % self.every and not last:
            return
        row = update.row(self.every) | {"so_far": dict(self._so_far)}
        self.rows.append(row)
        self._fresh.append(row)
        self._held += 1 + len(row["calls"])
        while self._held > self._most and len(self.rows) > 1:
            self._thin()

    def _thin(self) -> None:
        """Keep every third update of those that are kept; of one alone, that one."""
        self.every *= 3
        kept = [row for row in self.rows if row["step"] % self.every == 0] or self.rows[-1:]
        self.rows = [{**row, "every": self.every} for row in kept]
        self._held = sum(1 + len(row["calls"]) for row in self.rows)
        self._thinned = True
