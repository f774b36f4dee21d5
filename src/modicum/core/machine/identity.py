"""Which machine this is, for what is measured of one: its name, and all that figures depend on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from modicum.core.errors import InputError
from modicum.core.files import regular, user_cache
from modicum.core.heap import HUGE_PAGE, mapped_from

_FORMAT = 16
# What of the environment changes what a process holds, or which kernels run.
_VARIABLES = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "MALLOC_CONF",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "DNNL_PRIMITIVE_CACHE_CAPACITY",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
)
_PREFIXES = ("MALLOC_", "TCMALLOC_")


def depends_on(device: str = "cpu") -> dict[str, str]:
    """All that a record depends on, by name: another value of any is another machine here."""
    libc = "-".join(platform.libc_ver()) or platform.platform()
    found = {
        "format": str(_FORMAT),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "libc": libc,
    }
    if device == "cuda":
        found["accelerator"] = torch.cuda.get_device_name()
    if device == "cpu" and mapped_from() == HUGE_PAGE:
        found["a budget"] = f"tensors are mapped from {HUGE_PAGE} bytes on"
    names = [name for name in os.environ if name in _VARIABLES or name.startswith(_PREFIXES)]
    return found | {name: os.environ[name] for name in sorted(names)}


def cache_folder() -> Path:
    """Where records are kept: `$XDG_CACHE_HOME/modicum/machines`, or below `~/.cache`."""
    return user_cache("machines")


def fallback_folder(*, make: bool = False) -> Path:
    """This user's folder among temporary files, where anybody may have made one of its name.

    Raises:
        InputError, OSError: it is not this user's alone; there is none.
    """
    folder = Path(tempfile.gettempdir()) / f"modicum-machines-{os.getuid()}"
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
    if not own or about.st_mode & 0o022:
        raise InputError("is not this user's alone; remove it, or set XDG_CACHE_HOME", file=folder)
    return folder


def record_file(device: str = "cpu") -> Path:
    """The file of this machine's record, there or not."""
    digest = hashlib.sha256(json.dumps(depends_on(device), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{digest[:16]}.json"


def processor() -> str:
    """The processor's name, as the system has it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def why_again(file: Path, key: str) -> str:
    """What of this process is other than of those that were measured here; empty: there are none.

    Of several it is the one that differs least.
    """
    depends: dict[str, str] = json.loads(key)
    found: list[list[str]] = []
    for other in file.parent.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            before = dict(json.loads(regular(other).read_bytes())["depends_on"])
            names = sorted(depends.keys() | before.keys())
            differs = [each for each in names if depends.get(each) != before.get(each)]
            if differs:
                found.append(differs)
    least = sorted(found, key=len)[:1]
    return f" again (other than before: {', '.join(least[0])})" if least else ""
