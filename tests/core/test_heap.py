from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from modicum.cli import allocator
from modicum.cli.allocator import tuned
from modicum.core.heap import HUGE_PAGE, LARGEST, THRESHOLD, mapped_from

# Where a tensor just below and one just above the size are: in the heap, or in pages of their own.
MAPPED = """
import ctypes, json
import torch
from modicum.core.heap import mapped_from

class Heap(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
found, tensors = [mapped_from()], []
for more in (-4096, 0):
    before = libc.mallinfo2().hblks
    tensors += [torch.empty(mapped_from() + more, dtype=torch.uint8) for _ in range(4)]
    found.append(libc.mallinfo2().hblks - before)
print(json.dumps(found))
"""


@pytest.mark.skipif(not allocator._has_huge_pages(), reason="glibc has no huge pages here")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_command_maps_what_fills_a_huge_page_and_knows_it(ranks):
    done = subprocess.run(
        [sys.executable, "-c", MAPPED], env=tuned(os.environ, ranks=ranks), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [HUGE_PAGE, 0, 4]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", LARGEST),
        (f"{THRESHOLD}=4096", 4096),
        (f"glibc.malloc.mxfast=0:{THRESHOLD}=4096:glibc.malloc.hugetlb=1", 4096),
        (f"{THRESHOLD}={2 * LARGEST}", LARGEST),  # glibc allows no more
        (f"{THRESHOLD}=much", LARGEST),
        (f"{THRESHOLD}", LARGEST),
    ],
)
def test_the_size_is_what_the_environment_says(monkeypatch, words, expected):
    monkeypatch.setenv("GLIBC_TUNABLES", words)
    assert mapped_from() == expected
