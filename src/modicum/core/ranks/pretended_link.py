"""A link that is slower than the one that is there, for experiments without privileges."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf


class Link:
    """A link that is slower than the one that is there, for experiments without privileges.

    A call ends no sooner than `latency` seconds for each step of its ring and its bytes over `rate`
    have passed since it began, or since the call before it ended. The time is slept: it costs no
    core, so what overlaps with it is real. It runs from this rank's own call on, and so knows
    nothing of a rank that comes late.

    Args:
        rate: bytes a second in which a rank sends.
        latency: seconds a step; a ring of W ranks takes W - 1 for a reduce-scatter or an
            all-gather, twice that for an all-reduce.

    >>> link = Link(rate=1e6, latency=0.001)
    >>> first, second = link.reserve(5000, 3), link.reserve(5000, 3)
    >>> round(second - first, 6)
    0.008
    """

    def __init__(self, rate: float = inf, latency: float = 0.0) -> None:
        self.rate, self.latency = rate, latency
        self._free, self._lock = -inf, threading.Lock()

    def reserve(self, sent: int, steps: int) -> float:
        """The instant (of `time.monotonic`) at which a call that begins now is through."""
        with self._lock:  # engines share a link, and each has a thread that begins its calls
            now = max(time.monotonic(), self._free)
            self._free = now + self.latency * steps + sent / self.rate
            return self._free


# What engines are given that are made in a block of `pretending`.
_pretended: Link | None = None


def pretended() -> Link | None:
    """The link of the block of `pretending` that this is in, if any."""
    return _pretended


@contextmanager
def pretending(link: Link | None) -> Iterator[None]:
    """Engines that are made in this block share a pretended link, if they have none of their own.

    >>> with pretending(Link(rate=1e6)):
    ...     pretended().rate
    1000000.0
    >>> pretended() is None
    True
    """
    global _pretended
    before, _pretended = _pretended, link
    try:
        yield
    finally:
        _pretended = before
