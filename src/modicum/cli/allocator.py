"""The C library's allocator, set for tensors that come and go.

glibc keeps small blocks that are free in lists of each thread, where they part the large free
blocks between them. It asks for a little more than an aligned block before it takes one, so before
its version 2.38 a freed tensor's place often holds no other of the same size: a step takes up to
twice its tensors. Without these lists most of it is used again, and steps are as fast.

In the heap large tensors leave holes all the same. A run that has a budget of memory maps them on
their own (`modicum.core.heap`), in huge pages.

Each thread also has a heap of its own. What the threads that exchange tensors with other ranks have
freed then holds nothing of the main thread's, so ranks share one heap among their threads. A run
alone exchanges nothing, and keeps a heap a thread: threads that tokenize need not wait in turn.

oneDNN keeps the code that it makes for a product of a new shape, of 1,024 shapes; in bf16 that is
half a megabyte each. Where documents are computed one by one, or each layer has a rank of its own,
that came to 0.4 GB of a process of 2.0. It keeps fewer here; steps were as fast.

glibc reads such settings when a process begins, so a command that trains begins once more with
them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from modicum.core.heap import LARGEST, THRESHOLD

# Free blocks of any size are joined; a tensor is mapped on its own from 32 MB on, as it would come
# to be; the end of the heap is given back from 256 MB on, so that the pages of one step need not be
# had anew in the next.
TUNABLES = {
    "glibc.malloc.tcache_count": 0,
    "glibc.malloc.mxfast": 0,
    THRESHOLD: LARGEST,
    "glibc.malloc.trim_threshold": 256 * 2**20,
}
# Added where the kernel has huge pages for those who ask.
HUGE = {"glibc.malloc.hugetlb": 1}
# Added for ranks: one heap for all threads of a process.
SHARED = {"glibc.malloc.arena_max": 1}
# Shapes of which oneDNN keeps code.
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OLD_NAME = "DNNL_PRIMITIVE_CACHE_CAPACITY"
_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
_COMMANDS = ("train", "plan", "init", "bench", "verify", "reproduce", "compare")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")  # the interpreter's own


def tuned(environment: Mapping[str, str], *, ranks: int | None = None) -> dict[str, str]:
    """The environment with the settings; as it is where the user or another libc has others.

    Args:
        ranks: how many a run has; those of torchrun, or else one, if left out.

    >>> tuned({"LD_PRELOAD": "libjemalloc.so.2"})
    {'LD_PRELOAD': 'libjemalloc.so.2'}
    """
    found = dict(environment)
    if ranks is None:
        size = environment.get("WORLD_SIZE", "")
        ranks = int(size) if size.isdigit() else 1
    settings = TUNABLES | HUGE if _has_huge_pages() else TUNABLES
    ours, shared = _words(settings), _words(settings | SHARED)
    before = environment.get("GLIBC_TUNABLES", "")
    known = before.removesuffix(shared).removesuffix(ours).rstrip(":")
    theirs = "malloc" in environment.get("LD_PRELOAD", "") or "glibc.malloc" in known
    if theirs or not _on_glibc() or any(name in environment for name in _OWN):
        return found
    # What a rank starts is measured as that rank is: a heap that is shared stays so.
    chosen = shared if ranks > 1 or before.endswith(shared) else ours
    kernels = {} if _OLD_NAME in found else KERNELS
    return kernels | found | {"GLIBC_TUNABLES": ":".join(filter(None, [known, chosen]))}


def _words(settings: Mapping[str, int]) -> str:
    return ":".join(f"{name}={value}" for name, value in settings.items())


def begin_tuned(argv: Sequence[str] | None = None) -> None:
    """Begin this process once more with the settings, if it is a command that plans or trains.

    It stays the same process: number, files, and who waits for it.

    Args:
        argv: how the process began; the system's words if left out.
    """
    words = list(sys.orig_argv if argv is None else argv)
    environment = tuned(os.environ, ranks=_ranks(words))
    if sys.executable and environment != dict(os.environ) and _trains(words):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *words[1:]], environment)


def _trains(words: Sequence[str]) -> bool:
    """Whether these are the words of such a command of `modicum`: its script or its module.

    >>> _trains(["python", "-u", "-m", "modicum", "train"]), _trains(["python", "tests/modicum"])
    (True, False)
    """
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):  # the script
            return Path(word).name == "modicum" and any(each in _COMMANDS for each in rest)
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith(("--", *_WITH_VALUE)):
            if word.endswith("m"):
                return next(rest, "") == "modicum" and any(each in _COMMANDS for each in rest)
            if "c" in word:
                return False
    return False


def _ranks(words: Sequence[str]) -> int | None:
    """The number that follows `--ranks`, where one does.

    >>> _ranks(["modicum", "train", "--ranks", "2"]), _ranks(["modicum", "train", "--ranks=4"])
    (2, 4)
    """
    said = "=".join(words).split("=")
    after = said[said.index("--ranks") + 1 :] if "--ranks" in said else []
    return int(after[0]) if after and after[0].isdigit() else None


def _has_huge_pages() -> bool:
    """Whether glibc (from 2.35 on) can ask the kernel for huge pages, and gets them."""
    version = re.fullmatch(r"glibc (\d+)\.(\d+).*", _libc())
    try:
        enabled = _HUGE_PAGES.read_text(encoding="ascii")
    except (OSError, ValueError):
        return False
    can_ask = version is not None and (int(version[1]), int(version[2])) >= (2, 35)
    return can_ask and "[never]" not in enabled


def _on_glibc() -> bool:
    return sys.platform == "linux" and _libc().startswith("glibc")


def _libc() -> str:
    """The C library's name and version."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""
