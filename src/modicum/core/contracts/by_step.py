"""Numbers of a method that change as a run goes: functions of its step, so resuming needs no state.

One type for a warm-up, in which there is no such number yet, for what rises (a rank, a sparsity)
and for what falls (a bound on errors).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ByStep:
    """A number that goes from `first` to `last` in even parts.

    Args:
        first: from update `start_after` on.
        last: from `updates` later on.
        updates: between both; 0: there is `last` alone.
        start_after: updates before the first one that has the number at all.

    >>> rank = ByStep(1, 4, updates=6, start_after=2)
    >>> [rank.at(step) for step in (1, 2, 5, 8, 100)]
    [None, 1.0, 2.5, 4, 4]
    >>> [rank.count_at(step) for step in (1, 2, 5, 8)]
    [None, 1, 2, 4]
    """

    first: float
    last: float
    updates: int = 0
    start_after: int = 0

    @classmethod
    def of(cls, said: float | tuple[float, float, int], start_after: int = 0) -> ByStep:
        """What a field says: one number for all updates, or (first, last, updates)."""
        first, last, updates = said if isinstance(said, tuple) else (said, said, 0)
        return cls(first, last, updates, start_after)

    @property
    def most(self) -> float:
        """The largest that there is: what is planned for."""
        return max(self.first, self.last)

    def at(self, step: int) -> float | None:
        """In the update after `step` others; None: there is none yet."""
        since = step - self.start_after
        if since < 0:
            return None
        if since >= self.updates:
            return self.last
        return self.first + (self.last - self.first) * since / self.updates

    def count_at(self, step: int) -> int | None:
        """The same of what is counted, rounded down."""
        found = self.at(step)
        return None if found is None else int(found + 1e-9)
