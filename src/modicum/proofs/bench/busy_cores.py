"""How much of the machine's processors programs have. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass
class BusyCores:
    """Of the machine's processors, which part of their time programs had; what waits counts not.

    >>> busy = BusyCores()
    >>> busy.begin()
    >>> busy.end()
    >>> 0 <= busy.share <= 1
    True
    """

    used: float = 0.0
    of: float = 0.0

    def begin(self) -> None:
        """Count from here on."""
        used, of = _core_seconds()
        self.used, self.of = self.used - used, self.of - of

    def end(self) -> None:
        """Count no more."""
        used, of = _core_seconds()
        self.used, self.of = self.used + used, self.of + of

    @property
    def share(self) -> float:
        """Of all seconds that were counted."""
        return self.used / self.of if self.of > 0 else 0.0


def _core_seconds() -> tuple[float, float]:
    """Seconds that programs and the kernel had the processors, and all seconds of these."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # What a guest gets is in its user's time, too.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    of = sum(times) - guests
    return of - idle, of
