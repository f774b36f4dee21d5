"""Where a process's time goes: every instant belongs to one row, so the rows sum to the clock.

A row is a name; what stands behind a slash is a part of it (`compute/forward`). Code says by a
`with` what it does. Inside of another row the inner one counts alone, so nothing counts twice, and
what no row claims is `unexplained`. Only the thread that runs the program keeps the clock; while
it waits for another one, such as that of a backward pass, that one may.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

START = "start-up"
IMPORTS, PLANNING, JOINING = f"{START}/imports", f"{START}/plan", f"{START}/joining ranks"
PREPARING, BUILDING, TRIALS = f"{START}/data", f"{START}/model", f"{START}/trials"
FORWARD, BACKWARD, UPDATE = "compute/forward", "compute/backward", "compute/update"
DATA, WIRE, WAITING = "data", "wire", "waiting for ranks"
CHECKPOINT, EVALUATING, SAMPLING = "checkpoint", "evaluation/metrics", "evaluation/samples"
TRACKING, EXPORT, SURGERY = "tracking", "export", "surgery"
LOST, AGAIN = "lost work/steps done again", "starting again"
UNEXPLAINED = "unexplained"

_NANO = 1e9


class Clock:
    """Seconds by row since it was made, which sum to the time that has passed.

    It begins in the row `start-up`, where all time counts that no inner row claims.

    Args:
        now: gives the time, in nanoseconds; it never runs backwards.
        age: nanoseconds that have passed before this, in the row `start-up/imports`.

    >>> ticks = iter(range(0, 10**12, 10**9))
    >>> clock = Clock(lambda: next(ticks))
    >>> with clock(DATA):
    ...     with clock(WIRE):
    ...         pass
    >>> clock.rows()
    {'start-up': 2.0, 'data': 2.0, 'wire': 1.0}
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns, *, age: int = 0) -> None:
        self._now = now
        self.restart()
        self(IMPORTS).spent += age
        self._begun -= age

    @classmethod
    def of_process(cls) -> Clock:
        """A clock that counts from the process's start, where the system says when that was."""
        return cls(age=_process_age())

    def restart(self) -> None:
        """Begin anew, as for another run in this process."""
        self._rows: dict[str, Row] = {}
        self._open = [self(START)]
        self._since = self._begun = self._now()

    def __call__(self, name: str) -> Row:
        """The row of this name, as a context whose time counts in it."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = Row(self, name)
        return row

    def enter(self, phase: str) -> None:
        """From here on, time that no row claims counts in this one."""
        self._turn()
        self._open[0] = self(phase)

    @property
    def seconds(self) -> float:
        """All that has passed."""
        return (self._now() - self._begun) / _NANO

    def total(self, name: str) -> float:
        """Seconds in a row; where it is open, up to where rows last changed."""
        return self(name).spent / _NANO

    def rows(self) -> dict[str, float]:
        """Seconds by row, in the order in which they came; together all that has passed."""
        self._turn()
        return {row.name: row.spent / _NANO for row in self._rows.values() if row.spent}

    def move(self, source: str, target: str, seconds: float) -> None:
        """Let a part of what is in `source`, at most all of it, count in `target`."""
        moved = min(round(seconds * _NANO), self(source).spent)
        self(source).spent -= moved
        self(target).spent += moved

    def rename(self, group: str, target: str) -> None:
        """Let all that a group's rows hold count in `target`."""
        self._turn()
        for row in [row for row in self._rows.values() if group_of(row.name) == group]:
            self.move(row.name, target, row.spent / _NANO)

    def _turn(self) -> None:
        now = self._now()
        self._open[-1].spent += now - self._since
        self._since = now


class Row(AbstractContextManager[None]):
    """One row of a clock; a context that may be entered inside of itself.

    Attributes:
        spent: nanoseconds in it, up to where rows last changed.
    """

    __slots__ = ("_clock", "name", "spent")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self.name, self.spent = clock, name, 0

    # An update enters ten rows and more: what `_turn` does is written out here, as a call costs
    # as much again.

    def __enter__(self) -> None:
        clock = self._clock
        now = clock._now()
        clock._open[-1].spent += now - clock._since
        clock._since = now
        clock._open.append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        clock = self._clock
        now = clock._now()
        clock._open.pop().spent += now - clock._since
        clock._since = now


def group_of(row: str) -> str:
    """What a row is a part of: itself, or what stands before the slash.

    >>> group_of(FORWARD), group_of(DATA)
    ('compute', 'data')
    """
    return row.partition("/")[0]


def _process_age() -> int:
    """Nanoseconds since this process was started; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as handle:
            # The name, which may hold anything, stands in brackets.
            ticks = int(handle.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
    started = ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started)
