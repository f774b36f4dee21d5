"""How many cores there are for this process. Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from modicum.core.control_groups import groups_around


def usable_cores() -> int:
    """The cores that this process may use, under the limits of all control groups around it.

    >>> usable_cores() >= 1
    True
    """
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    for group in groups_around():
        with suppress(OSError, ValueError):  # it has no limit, or is seen by another path in here
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
            count = min(count, max(1, int(quota) // int(period)))
    return count
