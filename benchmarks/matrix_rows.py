"""The rows of the matrix: a default, and nineteen that change one thing of it each.

The default is what a user gets: the running Python, pip's default PyTorch, the versions of
constraints.txt, in a checkout under a plain path, with a locale of UTF-8 and nothing else in the
environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from matrix_host import MINORS, Host

NOBODY = 65534
UMLAUTS = "modicum – Größe ü"
# What a level of instructions needs of the processor, by the three libraries' names for it.
AVX512 = ("AVX512_CORE", "avx512", "AVX512")
AVX2 = ("AVX2", "avx2", "AVX2")
BASELINE = ("SSE41", "default", "SSE4_2")
_NEEDS = {
    AVX512: {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    AVX2: {"avx2", "fma"},
    BASELINE: {"sse4_1", "sse4_2"},
}


@dataclass(frozen=True)
class Row:
    """One way to run the same work."""

    name: str
    claim: str
    """What the README may say where the row passed."""
    wheel: str = "default"
    minor: int | None = None
    """Another Python, 3.`minor`."""
    lowest: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    level: tuple[str, str, str] | None = None
    pinned: tuple[int, int | None] | None = None
    """So many cores, and so many threads on them where that is not theirs to choose."""
    busy: bool = False
    user: int | None = None
    """Another user, who is lent the right to read where Python is in root's home."""
    bare: bool = False
    """No git folder, and a home with nothing in it."""
    folder: str = "modicum"
    preload: bool = False

    @property
    def full_demo(self) -> bool:
        """Whether the demo does all of its steps: with each wheel once."""
        return self.name == "default" or self.wheel != "default"

    def why_not(self, host: Host) -> str | None:
        """Why the row cannot run on that machine; None where it can."""
        if (self.minor or host.minor) not in host.pythons:
            return "not installed, or without venv"
        for program, needed in (
            ("git", True),
            ("taskset", self.pinned is not None),
            ("setpriv", self.user is not None),
        ):
            if needed and program not in host.programs:
                return f"there is no {program}"
        if self.pinned is not None and len(host.cores) < 2:
            return "there is one core only"
        if self.level is not None and not _NEEDS[self.level] <= host.flags:
            return f"the processor has no {self.level[0]}"
        if self.preload and (host.allocator is None or host.system != "Linux"):
            return "neither jemalloc nor tcmalloc is installed"
        return self._why_no_other_user(host) if self.user is not None else None

    def _why_no_other_user(self, host: Host) -> str | None:
        if host.uid != 0:
            return "only root can become another user; no row runs as root here"
        if not (host.others_read or host.lends_reading):
            return "other users cannot read Python or the environments; choose another --cache"
        return None

    def set_variables(self, host: Host) -> dict[str, str]:
        """The environment variables that the row adds."""
        added = dict(self.variables)
        if self.pinned is not None and self.pinned[1] is not None:
            added["OMP_NUM_THREADS"] = str(self.pinned[1])
            added["MKL_DYNAMIC"] = "FALSE"  # or MKL takes no more threads than there are cores
        if self.level is not None:
            names = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
            added |= zip(names, self.level, strict=True)
        if self.preload and host.allocator is not None:
            added["LD_PRELOAD"] = host.allocator
        return added

    def wrapper(self, host: Host) -> list[str]:
        """The words before each command."""
        words = []
        if self.pinned is not None:
            words += ["taskset", "--cpu-list", ",".join(map(str, host.cores[: self.pinned[0]]))]
        if self.user is not None:
            words += ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
            rights = "-all" if host.others_read else "-all,+dac_read_search"
            sets = ("--inh-caps", "--ambient-caps", "--bounding-set")
            words += [f"{name}={rights}" for name in sets]
            # Without this bit access(2) would deny what reading then allows.
            words += [] if host.others_read else ["--securebits=+no_setuid_fixup"]
        return words

    def expected(self, host: Host) -> dict[str, Any]:
        """What a process of the row must find, so that a change without effect is noticed."""
        found: dict[str, Any] = {"minor": self.minor or host.minor}
        found["uid"] = host.uid if self.user is None else self.user
        if self.wheel == "cpu":
            found["cuda_built"] = False
        if self.level is not None:
            found["capability"] = self.level[1].upper()
        if self.pinned is not None:
            cores, threads = self.pinned
            found |= {"cores": cores, "threads": threads or cores}
        if self.preload:
            found["preloaded"] = True
        if "PYTHONUTF8" in self.variables:
            found["encoding"] = "ascii"
        return found


def rows(host: Host) -> list[Row]:
    """All rows; those of other Pythons are of the versions that are not the default's."""
    pythons = [
        Row(f"python-3.{minor}", f"Python 3.{minor}", minor=minor)
        for minor in MINORS
        if minor != host.minor
    ]
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    return [
        Row("default", f"Python 3.{host.minor} with pip's default PyTorch"),
        Row("cpu-wheel", "PyTorch's CPU build", wheel="cpu"),
        *pythons,
        Row("lowest", "the lowest versions that `pyproject.toml` allows", lowest=True),
        Row("avx512", "instructions up to AVX-512", level=AVX512),
        Row("avx2", "instructions up to AVX2", level=AVX2),
        Row("baseline", "instructions up to SSE4", level=BASELINE),
        Row("one-core", "one core", pinned=(1, None)),
        Row("four-threads", "four threads on two cores", pinned=(2, 4)),
        Row("busy", "a process next to it that keeps all cores busy", busy=True),
        Row("not-root", "a user who is not root", user=NOBODY),
        Row("bare", "an empty home and no git folder", bare=True),
        Row("path", "a path with spaces and umlauts", folder=UMLAUTS),
        Row("ascii", "a locale of ASCII", variables=plain),
        Row("hash-seed-0", "the hash seed 0", variables={"PYTHONHASHSEED": "0"}),
        Row("hash-seed-1", "the hash seed 1", variables={"PYTHONHASHSEED": "1"}),
        Row("allocator", "jemalloc or tcmalloc", preload=True),
        Row("one-arena", "one arena of malloc", variables={"MALLOC_ARENA_MAX": "1"}),
    ]
