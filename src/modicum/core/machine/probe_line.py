"""A line on a terminal that says how far the measuring of this machine is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from modicum.core.units import format_duration

# Small runs on a processor, each of which is a line of the probe's standard error: those that every
# record is of, those of parts that are measured when they are needed, and one before any of them.
RUNS = {"every": 8, "recomputation": 2, "images": 5, "sequences": 3, "compiled": 2}
Waiting = Callable[[float, int], None]
"""(seconds so far, lines so far)."""


def runs_of(parts: Iterable[str]) -> int:
    """How many runs measure these parts.

    >>> runs_of(["every"]), runs_of(["images"])
    (9, 6)
    """
    return 1 + sum(RUNS[part] for part in parts)


@contextmanager
def probe_line(device: str, runs: int) -> Iterator[Waiting | None]:
    """What rewrites the line, which is gone at the end; None where there is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return

    def rewrite(seconds: float, lines: int) -> None:
        said = f", {min(lines, runs)} of {runs} parts measured" if device == "cpu" else ""
        line = f"  {format_duration(seconds)}{said}"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    try:
        yield rewrite
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
