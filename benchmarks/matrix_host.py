"""What the matrix must know of a machine to say which of its rows can run there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

MINORS = (11, 12, 13, 14)
PROGRAMS = ("git", "setpriv", "taskset")
ALLOCATORS = ("jemalloc", "tcmalloc")
_READ_ANYTHING = 1 << 2  # CAP_DAC_READ_SEARCH of <linux/capability.h>


@dataclass(frozen=True)
class Host:
    """A machine, as it bears on rows; `pythons` by their minor version."""

    system: str = "Linux"
    architecture: str = "x86_64"
    flags: frozenset[str] = frozenset()
    cores: tuple[int, ...] = (0, 1)
    """The numbers of those that this process may use."""
    uid: int = 0
    programs: frozenset[str] = frozenset(PROGRAMS)
    allocator: str | None = None
    """The library's file, where there is one."""
    pythons: dict[int, str] = field(default_factory=dict)
    minor: int = 11
    """Of the Python that runs the matrix, which is the default row's."""
    others_read: bool = True
    """Whether another user may read the Pythons and the environments."""
    lends_reading: bool = True
    """Whether another user can be given that right for a row."""

    @property
    def described(self) -> str:
        """The machine in words, for the README."""
        return f"{self.system} {self.architecture.replace('_', '-')}"

    @property
    def identity(self) -> str:
        """What makes it another machine, for which other rows' outcomes say nothing."""
        known = (self.described, sorted(self.flags), self.cores, self.uid, self.allocator)
        return repr(known)


def this_host(cache: Path) -> Host:
    """Look at this machine; environments will be in `cache`."""
    pythons = {minor: found for minor in MINORS if (found := _python(minor))}
    read = [cache, *(Path(python) for python in pythons.values())]
    return Host(
        system=platform.system(),
        architecture=platform.machine(),
        flags=_flags(),
        cores=_cores(),
        uid=os.getuid(),
        programs=frozenset(name for name in PROGRAMS if shutil.which(name)),
        allocator=_allocator(),
        pythons=pythons,
        minor=sys.version_info.minor,
        others_read=all(_others_read(path) for path in read),
        lends_reading=_lends_reading(),
    )


def _flags() -> frozenset[str]:
    """What the processor says that it can do; nothing where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(found[0].split()) if found else frozenset()


def _cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _python(minor: int) -> str | None:
    """A Python 3.`minor` that can make virtual environments; the running one comes first."""
    name = f"python3.{minor}"
    versions = Path.home() / ".pyenv" / "versions"
    folders = [
        Path(sys.base_prefix) / "bin",
        *(Path(part) for part in os.get_exec_path()),
        *sorted(versions.glob(f"3.{minor}.*/bin")),
        Path("/usr/bin"),
        Path("/usr/local/bin"),
    ]
    # A shim of pyenv is there for every version, and fails for those that are not chosen.
    check = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, {minor}))"
    for folder in folders:
        python = folder / name
        if os.access(python, os.X_OK):
            done = subprocess.run([python, "-Ic", check], capture_output=True, check=False)
            if done.returncode == 0:
                return str(python)
    return None


def _allocator() -> str | None:
    """The file of jemalloc or tcmalloc, as the dynamic linker or usual folders have it."""
    ldconfig = shutil.which("ldconfig", path=os.defpath + ":/sbin:/usr/sbin")
    lines: list[str] = []
    if ldconfig:
        done = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False)
        lines = [line.rpartition("=> ")[2].strip() for line in done.stdout.splitlines()]
    folders = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/homebrew/lib")
    for name in ALLOCATORS:
        known = [line for line in lines if Path(line).name.startswith(f"lib{name}")]
        usual = [str(path) for folder in folders for path in Path(folder).glob(f"lib{name}*.so*")]
        if found := known + sorted(usual):
            return found[0]
    return None


def _others_read(path: Path) -> bool:
    """Whether every folder on the way to `path` lets other users through."""
    path = path.resolve()
    return all(folder.stat().st_mode & 0o001 for folder in path.parents if folder.exists())


def _lends_reading() -> bool:
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return False
    bounds = [line.split()[1] for line in status.splitlines() if line.startswith("CapBnd")]
    return bool(bounds) and bool(int(bounds[0], 16) & _READ_ANYTHING)
