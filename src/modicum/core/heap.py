"""From which size on the C library maps a tensor on its own, rather than place it in its heap.

What is mapped is given back when it is free, so a process holds no holes between such tensors, and
what it holds can be foreseen. Its pages are had anew each time, though, which takes a part of a
step (`benchmarks/allocator.py`). So a run that has a budget of memory maps what fills a huge page,
and any other run the largest tensors alone.
"""

from __future__ import annotations

import os

HUGE_PAGE = 2 * 2**20
LARGEST = 32 * 2**20  # the most that glibc allows
THRESHOLD = "glibc.malloc.mmap_threshold"
_M_MMAP_THRESHOLD = -3  # of malloc.h

_chosen: int | None = None


def mapped_from() -> int:
    """The size in bytes: as `map_for` chose it, or as this process's environment has it.

    Where neither says anything, glibc comes to the largest that it allows as tensors are freed.

    >>> from unittest.mock import patch
    >>> with patch.dict("os.environ", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4096"}):
    ...     mapped_from()
    4096
    """
    found = LARGEST
    for word in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        name, _, value = word.partition("=")
        if name == THRESHOLD and value.isdigit():
            found = min(int(value), LARGEST)
    return found if _chosen is None else _chosen


def map_for(*, budget: bool) -> None:
    """Map as a run needs that has a budget of memory, or as one that has none.

    Nothing changes in a process that did not begin with the settings of modicum's commands, or
    where the kernel has no huge pages: in small ones it costs more.
    """
    global _chosen
    size = HUGE_PAGE if budget else LARGEST
    words = os.environ.get("GLIBC_TUNABLES", "").split(":")
    ours = {f"{THRESHOLD}={LARGEST}", "glibc.malloc.hugetlb=1"} <= set(words)
    if not ours or size == mapped_from():
        return
    import ctypes

    if ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, size):
        _chosen = None if size == LARGEST else size
