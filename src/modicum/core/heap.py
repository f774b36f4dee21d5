"""From which size on the C library maps a tensor on its own, rather than place it in its heap.

What is mapped is given back when it is free: a process then holds no holes between such tensors.
"""

from __future__ import annotations

import os

HUGE_PAGE = 2 * 2**20
LARGEST = 32 * 2**20  # the most that glibc allows
THRESHOLD = "glibc.malloc.mmap_threshold"


def mapped_from() -> int:
    """The size in bytes: as this process's environment has it, which `modicum`'s commands set.

    Where it says nothing, glibc comes to the largest that it allows as tensors are freed.

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
    return found
