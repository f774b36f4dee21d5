from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from modicum.cli import allocator
from modicum.cli.allocator import tuned
from modicum.core.heap import HUGE_PAGE, LARGEST, THRESHOLD, mapped_from

# How many of four tensors of 3 MB have pages of their own, without a budget, with one, and without.
MAPPED = """
import ctypes, json
import torch
from modicum.core.heap import map_for, mapped_from

class Heap(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
found, tensors = [], []
for budget in (False, True, False):
    map_for(budget=budget)
    before = libc.mallinfo2().hblks
    tensors += [torch.empty(3 * 2**20, dtype=torch.uint8) for _ in range(4)]
    found.append([mapped_from(), libc.mallinfo2().hblks - before])
print(json.dumps(found))
"""


def seen(environment: dict[str, str]) -> list[list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", MAPPED], env=environment, capture_output=True, text=True, check=True
    )
    found: list[list[int]] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not allocator._has_huge_pages(), reason="glibc has no huge pages here")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_with_a_budget_maps_what_fills_a_huge_page(ranks):
    found = seen(tuned(os.environ, ranks=ranks))
    assert found == [[LARGEST, 0], [HUGE_PAGE, 4], [LARGEST, 0]]


@pytest.mark.skipif(not allocator._on_glibc(), reason="another C library")
@pytest.mark.parametrize("words", [f"{THRESHOLD}={LARGEST}", f"{THRESHOLD}={LARGEST - 1}"])
def test_a_process_with_other_settings_keeps_them(words):
    size = int(words.partition("=")[2])
    assert seen(os.environ | {"GLIBC_TUNABLES": words}) == [[size, 0]] * 3


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
