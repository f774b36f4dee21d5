"""The machine that a run is on: what it is, what it has, how fast it multiplies."""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from modicum.core.control_groups import groups_around
from modicum.core.cores import usable_cores
from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.core.machine.identity import processor

_WARM_UP_SECONDS = 0.3


@dataclass(frozen=True)
class Machine:
    """What plans and reports need to know of a machine; sizes in bytes, rates in FLOP/s.

    Args:
        cores: that the process may use.
        threads: that PyTorch computes with; `flops` is their rate.
        memory_bytes: that the process may use; `available_bytes`: what of that is free.
    """

    processor: str
    cores: int
    threads: int
    memory_bytes: int
    available_bytes: int
    accelerator: str | None
    accelerator_bytes: int | None
    flops: float

    def as_json(self) -> dict[str, Any]:
        """The record as plain values."""
        return asdict(self)


def this_machine(device: torch.device) -> Machine:
    """Look at this machine, and time a matrix product on `device` (a tenth of a second)."""
    on_gpu = device.type == "cuda"
    total, available = memory_bytes()
    return Machine(
        processor=processor(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        memory_bytes=total,
        available_bytes=available,
        accelerator=torch.cuda.get_device_name(device) if on_gpu else None,
        accelerator_bytes=torch.cuda.mem_get_info(device)[1] if on_gpu else None,
        flops=_matrix_rate(device, 4096 if on_gpu else 512),
    )


def pick_device(wanted: str) -> torch.device:
    """The device a recipe means by `auto`, `cpu` or `cuda`.

    Raises:
        InputError: CUDA is asked for and not there.
    """
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise InputError(
            "PyTorch finds no CUDA device here",
            field="training.device",
            value=wanted,
            allowed="auto, cpu",
        )
    if wanted == "auto":
        wanted = "cuda" if there else "cpu"
    return torch.device(wanted)


def versions() -> dict[str, str]:
    """Python's and torch's versions, for the run's record."""
    return {"python": platform.python_version(), "torch": str(torch.__version__)}


def memory_bytes() -> tuple[int, int]:
    """What this process may use, and what of that is free without swapping.

    Both are under the limits of all control groups around the process, as a container's.
    """
    memory = library("psutil", "cli", "a plan").virtual_memory()
    total, available = memory.total, memory.available
    for group in groups_around():
        with suppress(OSError, ValueError):  # it has no limit, or is seen by another path in here
            limit, used = (int((group / f"memory.{it}").read_text()) for it in ("max", "current"))
            total = min(total, limit)
            available = min(available, limit - max(0, used - _pages_of_files(group)))
    return total, max(available, 0)


def _pages_of_files(folder: Path) -> int:
    """Bytes of a control group that hold files, and are given back when memory is needed."""
    with suppress(OSError, ValueError):
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(rows.get(name, 0)) for name in ("inactive_file", "active_file"))
    return 0


def _matrix_rate(device: torch.device, size: int) -> float:
    left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(4):
            left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / 4

    # An accelerator that had nothing to do raises its clock over some tenths of a second.
    warm = time.perf_counter() + (_WARM_UP_SECONDS if device.type == "cuda" else 0.0)
    for _ in range(2):
        timed()
    while time.perf_counter() < warm:
        timed()
    seconds = [timed() for _ in range(5)]
    return 2 * size**3 / median(seconds)
