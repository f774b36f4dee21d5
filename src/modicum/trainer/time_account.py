"""Where a run's time went, over all its processes: the rows of `time` in run.json.

A process that was killed could write down little of its end. What it had spent is known all the
same: by the newest of run.json, the line of its last step and the notes of its last checkpoint.
What came after the checkpoint that the run resumes from has to be done again, and is lost work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from modicum.core.clock import AGAIN, LOST, START, UNEXPLAINED, WAITING, WIRE, Clock
from modicum.core.ranks.ranks import Ranks

_DUST = 1e-6  # seconds: less than this is rounding
_LONGEST = 1e12  # seconds: what a damaged file may say is more


def rows_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The rows of a run.json, or of a checkpoint's notes; their sum is its `seconds`.

    What no row has, as those of an earlier version of modicum, is unexplained.

    >>> rows_of({"seconds": 3.0, "time": {"rows": {"data": 1.0}}})
    {'data': 1.0, 'unexplained': 2.0}
    """
    found = _mapping(_mapping(record.get("time")).get("rows"))
    rows = {name: value for name, each in found.items() if (value := _seconds(each))}
    if (left := _seconds(record.get("seconds")) - math.fsum(rows.values())) > _DUST:
        rows[UNEXPLAINED] = rows.get(UNEXPLAINED, 0.0) + left
    return rows


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _seconds(value: Any) -> float:
    """A duration out of a file; 0 for what is none."""
    known = isinstance(value, int | float) and 0 <= value < _LONGEST
    return float(value) if known else 0.0


def carried(
    record: Mapping[str, Any],
    notes: Mapping[str, Any],
    metrics: Iterable[Mapping[str, Any]],
    step: int,
) -> dict[str, float]:
    """What the processes before this one spent, when the run resumes after `step`.

    Args:
        record: run.json as they left it.
        notes: of the checkpoint that the run resumes from, which has its rows.
        metrics: the lines of all steps, also of those that will be done again.

    >>> left = {"seconds": 5.0, "time": {"rows": {"data": 5.0}}}
    >>> saved = {"seconds": 4.0, "time": {"rows": {"data": 4.0}}}
    >>> carried(left, saved, [{"step": 2, "elapsed": 6.0}], step=1)
    {'data': 4.0, 'lost work/steps done again': 2.0}
    """
    written, saved = rows_of(record), rows_of(notes)
    last, again = 0.0, False
    for row in metrics:
        last = max(last, _seconds(row.get("elapsed")))
        again = again or row["step"] > step
    spent, kept = math.fsum(written.values()), math.fsum(saved.values())
    rows = saved if again or kept > spent else written
    if (lost := max(last, spent, kept) - math.fsum(rows.values())) > _DUST:
        rows = rows | {LOST: rows.get(LOST, 0.0) + lost}
    return rows


class TimeAccount:
    """The rows of a run: this process's, by its clock, and those of the processes before it.

    Attributes:
        writing: seconds from the beginning of each save until its checkpoint was in its place.
    """

    def __init__(self, clock: Clock, record: Mapping[str, Any]) -> None:
        self.clock, self._before = clock, rows_of(record)
        time = _mapping(record.get("time"))
        self.writing = _seconds(time.get("checkpoint_writing"))
        self._ranks: dict[str, Any] | None = time.get("ranks")

    @property
    def seconds(self) -> float:
        """All that the run has taken."""
        return math.fsum(self._before.values()) + self.clock.seconds

    def carry(self, rows: Mapping[str, float]) -> None:
        """Take over what earlier processes spent."""
        self._before = dict(rows)

    def begun(self, *, again: bool) -> None:
        """The start-up is over; where the run had begun before, it was starting again."""
        if again:
            self.clock.rename(START, AGAIN)
        self.clock.enter(UNEXPLAINED)

    def as_json(self) -> dict[str, Any]:
        """`seconds` and `time` of run.json."""
        rows = dict(self._before)
        for name, seconds in self.clock.rows().items():
            rows[name] = rows.get(name, 0.0) + seconds
        time = {"rows": rows, "ranks": self._ranks, "checkpoint_writing": self.writing}
        return {"seconds": math.fsum(rows.values()), "time": time}

    def compare(self, ranks: Ranks) -> None:
        """See how the rows of this start differ between ranks; all of them call this."""
        if not ranks.alone:
            self._ranks = over_ranks(ranks.gather(self.clock.rows()))


def over_ranks(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Of each row the median over the ranks, the most, and the rank that has it.

    >>> over_ranks([{"data": 1.0}, {"data": 3.0}])
    {'data': {'median': 2.0, 'most': 3.0, 'rank': 1}}
    """
    found = {}
    for name in dict.fromkeys(name for of_rank in rows for name in of_rank):
        values = [of_rank.get(name, 0.0) for of_rank in rows]
        most = max(values)
        found[name] = {"median": median(values), "most": most, "rank": values.index(most)}
    return found


class Waits:
    """Tells waiting for a slow rank from the wire.

    Who comes to an exchange last waits for nobody, and is held by the wire alone. So of what ranks
    were held in exchanges since they last agreed, the least is the wire, and what one was held
    longer is waiting for others. Where ranks are late by turns that is a lower bound of it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._counted = ranks, 0.0

    def mine(self) -> list[float]:
        """For a sum over the ranks: a place for each, which has this rank's seconds in its own."""
        places = [0.0] * (self._ranks.size if self._ranks.size > 1 else 0)
        if places:
            places[self._ranks.rank] = self._ranks.clock.total(WIRE) - self._counted
        return places

    def take(self, held: list[float]) -> None:
        """Take the sum of what all ranks gave, and move what was waiting to its own row."""
        if not held:
            return
        clock = self._ranks.clock
        clock.move(WIRE, WAITING, held[self._ranks.rank] - min(held))
        self._counted += min(held)

    def settle(self) -> None:
        """Do both now; every rank calls this."""
        if not self._ranks.alone:
            self.take(self._ranks.sum(*self.mine()))
