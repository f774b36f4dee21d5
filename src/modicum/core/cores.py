"""How many cores there are for this process. Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def usable_cores() -> int:
    """The cores that this process may use, under a container's limit if there is one.

    >>> usable_cores() >= 1
    True
    """
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        count = min(count, max(1, int(quota) // int(period)))
    return count
