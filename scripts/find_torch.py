"""Before pip installs PyTorch: take a wheel that is here, and warn of gigabytes that help nobody.

`make install` runs this with the Python and the pip of the environment that it fills. Only the
standard library is there by then.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# A folder of the user's own, in addition to what pip is configured with (PIP_FIND_LINKS).
WHEELS = Path("wheels")
# Seconds; pip answers in five where the index serves a wheel's metadata apart from the wheel.
PATIENCE = 60
# Before this version, pip downloads a wheel in order to say what it would install.
ANSWERS_FROM_METADATA = (23, 2)
# Measured on x86-64 Linux with the versions of constraints.txt, everything that is installed.
CUDA_SIZES = "2.9 GB to download, 5.4 GB on the disk"
CPU_SIZES = "0.4 GB to download, 1.6 GB on the disk"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def has_driver() -> bool:
    """Whether an NVIDIA driver is installed: then the CUDA build is the one to have."""
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def asked(pip: Sequence[str], *options: str, patience: float | None = None) -> list[Any] | None:
    """What pip has installed, or would install, of PyTorch alone; None when it failed.

    Raises:
        subprocess.TimeoutExpired: `patience` seconds were not enough.
    """
    links = ["--find-links", str(WHEELS)] if WHEELS.is_dir() else []
    done = subprocess.run(
        [*pip, *links, "--quiet", "--no-deps", "--report", "-", *options, "torch"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )
    try:
        return list(json.loads(done.stdout)["install"]) if done.returncode == 0 else None
    except (ValueError, KeyError):
        return None


def brings_cuda(wheel: dict[str, Any]) -> bool:
    """Whether a wheel asks for NVIDIA's packages."""
    requirements = wheel["metadata"].get("requires_dist", [])
    return any(text.startswith("nvidia-") and "extra ==" not in text for text in requirements)


def name_of(wheel: dict[str, Any]) -> str:
    """The file name of a wheel."""
    return Path(unquote(urlsplit(wheel["download_info"]["url"]).path)).name


def warning(*, certain: bool, goal: str) -> str:
    """What is about to come, and how to have less."""
    brings = "brings" if certain else "may bring"
    return (
        f"This machine has no NVIDIA driver, and pip's PyTorch {brings} the libraries of CUDA:\n"
        f"  about {CUDA_SIZES}.\n"
        f"The build without them (about {CPU_SIZES}) comes by\n"
        f"  PIP_EXTRA_INDEX_URL={CPU_INDEX} make {goal}\n"
        "Ctrl-C stops this one; docs/how-to/install.md has more."
    )


def pip_version() -> tuple[int, ...]:
    """The first two numbers of this environment's pip."""
    return tuple(int(number) for number in re.findall(r"\d+", metadata.version("pip"))[:2])


def cuda_comes(pip: Sequence[str], here: list[Any] | None) -> bool | None:
    """Whether pip would bring CUDA; None when that cannot be found out cheaply.

    Where pip fails it fails again in a moment, and make explains that: no word of it here.
    """
    found = here
    if found is None:
        if pip_version() < ANSWERS_FROM_METADATA:
            return None
        try:
            found = asked(pip, "--dry-run", patience=PATIENCE)
        except subprocess.TimeoutExpired:
            return None
    return brings_cuda(found[0]) if found else False


def main(goal: str, log: str, pip: Sequence[str]) -> None:
    """Install a PyTorch that is on this machine already, or say what pip would bring."""
    # Without the index first, because pip prefers it to a folder that has the same version.
    here = asked(pip, "--no-index")
    if here:
        line = f"Using {name_of(here[0])}, which is on this machine already"
        Path(log).write_text(line + "\n", encoding="utf-8")
        print(line, flush=True)
    # An empty answer: PyTorch is in the environment.
    if here == [] or not sys.platform.startswith("linux") or has_driver():
        return
    comes = cuda_comes(pip, here)
    if comes is not False:
        print(warning(certain=comes is not None, goal=goal), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
