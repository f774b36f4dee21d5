"""A line on a terminal that says how far the measuring of this machine is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from modicum.core.units import format_duration

PARTS = 14  # small runs on a processor, each of which is a line of the probe's standard error
Waiting = Callable[[float, int], None]
"""(seconds so far, lines so far)."""


@contextmanager
def probe_line(device: str) -> Iterator[Waiting | None]:
    """What rewrites the line, which is gone at the end; None where there is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        yield _on_processor if device == "cpu" else _elsewhere
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _on_processor(seconds: float, lines: int) -> None:
    _elsewhere(seconds, lines, f", {min(lines, PARTS)} of {PARTS} parts measured")


def _elsewhere(seconds: float, _: int, parts: str = "") -> None:
    line = f"  {format_duration(seconds)}{parts}"
    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
