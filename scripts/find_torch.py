"""Before pip installs PyTorch: take a wheel that is here, and warn of gigabytes that help nobody.

`make install` runs this with the Python and the pip of the environment that it fills. Only the
standard library is there by then.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# A folder of the user's own, in addition to what pip is configured with (PIP_FIND_LINKS).
WHEELS = Path("wheels")
# Seconds; pip answers in five where the index serves a wheel's metadata apart from the wheel.
PATIENCE = 60
# What pip says when it begins to fetch the wheel itself, and not its metadata alone.
WHEEL_BEGUN = re.compile(
    r"(?:Downloading|Using cached) \S*torch-[\d.]+(?:(?:\+|%2B)(?P<local>\w+))?-\S+\.whl(?!\S)"
)
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


def command(pip: Sequence[str], report: Path, *options: str) -> list[str]:
    """pip's command for PyTorch alone, which writes what it takes into `report`."""
    links = ["--find-links", str(WHEELS)] if WHEELS.is_dir() else []
    return [*pip, *links, "--no-deps", "--report", str(report), *options, "torch"]


def wheels_of(report: Path) -> list[Any]:
    """The wheels in a report of pip's: one, or none where PyTorch is installed."""
    return list(json.loads(report.read_text(encoding="utf-8"))["install"])


def install_from_here(pip: Sequence[str], report: Path) -> list[Any] | None:
    """Install PyTorch without asking an index; None when this machine has no wheel of it."""
    done = subprocess.run(
        command(pip, report, "--no-index"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return wheels_of(report) if done.returncode == 0 else None


def index_has_cuda(pip: Sequence[str], report: Path) -> bool | None:
    """Whether the wheel that pip would take brings CUDA; None when only a download would tell.

    Where pip fails it fails again in a moment, and make explains that: no word of it here.
    """
    # An old pip downloads the wheel to answer, as does any for an index without metadata. Its name
    # has to do then.
    begun = None
    with subprocess.Popen(
        command(pip, report, "--dry-run"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        for line in process.stdout or ():
            begun = begun or WHEEL_BEGUN.search(line)
            if begun:
                process.kill()
    timer.cancel()
    if begun:
        return {"cpu": False, "cu": True}.get((begun["local"] or "").rstrip("0123456789"))
    if process.returncode < 0:
        return None
    return process.returncode == 0 and any(map(brings_cuda, wheels_of(report)))


def brings_cuda(wheel: dict[str, Any]) -> bool:
    """Whether a wheel asks for NVIDIA's packages."""
    requirements = wheel["metadata"].get("requires_dist", [])
    return any(text.startswith("nvidia-") and "extra ==" not in text for text in requirements)


def name_of(wheel: dict[str, Any]) -> str:
    """The file name of a wheel."""
    return Path(unquote(urlsplit(wheel["download_info"]["url"]).path)).name


def warning(*, certain: bool, goal: str, asked: bool = False) -> str:
    """What is about to come, and how to have less.

    Args:
        asked: whether pip was given the index of the build without CUDA, and takes this one.
    """
    brings = "brings" if certain else "may bring"
    what = (
        f"This machine has no NVIDIA driver, and pip's PyTorch {brings} the libraries of CUDA:\n"
        f"  about {CUDA_SIZES}.\n"
    )
    if asked:
        return (
            f"{what}PIP_EXTRA_INDEX_URL names {CPU_INDEX},\n"
            "  but pip finds no PyTorch for this Python there; it may be out of reach from here.\n"
            "Ctrl-C stops this one; docs/how-to/install.md has more."
        )
    return (
        f"{what}The build without them (about {CPU_SIZES}) comes by\n"
        f"  PIP_EXTRA_INDEX_URL={CPU_INDEX} make {goal}\n"
        "Ctrl-C stops this one; docs/how-to/install.md has more."
    )


def main(goal: str, log: str, pip: Sequence[str]) -> None:
    """Install a PyTorch that is on this machine already, or say what pip would bring."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # Without the index first, because pip prefers it to a folder that has the same version.
        here = install_from_here(pip, report)
        if here:
            line = f"Using {name_of(here[0])}, which is on this machine already"
            Path(log).write_text(line + "\n", encoding="utf-8")
            print(line, flush=True)
        # An empty list: PyTorch is in the environment.
        if here == [] or not sys.platform.startswith("linux") or has_driver():
            return
        comes = brings_cuda(here[0]) if here else index_has_cuda(pip, report)
    if comes is not False:
        asked = CPU_INDEX in os.environ.get("PIP_EXTRA_INDEX_URL", "")
        print(warning(certain=comes is not None, goal=goal, asked=asked), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
