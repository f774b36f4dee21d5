"""The energy that this machine's own counters say it has taken: RAPL's and NVML's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Linux's counters of energy; on many machines for root alone.
RAPL = Path("/sys/class/powercap")
_MICRO, _MILLI = 1e-6, 1e-3


class EnergyCounters:
    """Counters of the processors' packages, and of an accelerator, from now on.

    A package's counter leaves out memory on most machines, and all that is neither: disks, fans,
    what the power supply loses.

    Args:
        accelerator: the index of CUDA's device whose counter is read too; None: of none.
        rapl: where Linux has its counters.
    """

    def __init__(self, accelerator: int | None = None, rapl: Path = RAPL) -> None:
        self._packages = [each for each in sorted(rapl.glob("*-rapl:*")) if _is_package(each)]
        self._device = None if accelerator is None else _nvml_device(accelerator)
        self._last = self._read()
        self._joules = 0.0

    @property
    def sources(self) -> Sequence[str]:
        """Which counters there are: `rapl`, `nvml`."""
        return (["rapl"] if self._packages else []) + (["nvml"] if self._device else [])

    def joules(self) -> float:
        """The energy taken since this was made."""
        now = self._read()
        for name, value in now.items():
            gone = value - self._last[name]
            if gone < 0:  # the counter began anew
                gone += _number(Path(name) / "max_energy_range_uj") * _MICRO
            self._joules += gone
        self._last = now
        return self._joules

    def _read(self) -> dict[str, float]:
        found = {str(each): _number(each / "energy_uj") * _MICRO for each in self._packages}
        if self._device is not None:
            library, handle = self._device
            found["nvml"] = library.nvmlDeviceGetTotalEnergyConsumption(handle) * _MILLI
        return found


def _is_package(folder: Path) -> bool:
    """Whether this is the counter of a package, and no part of one, that may be read."""
    try:
        name = (folder / "name").read_text().strip()
        _number(folder / "energy_uj")
    except (OSError, ValueError):
        return False
    return name.startswith("package")


def _number(file: Path) -> int:
    return int(file.read_text())


def _nvml_device(index: int) -> tuple[Any, Any] | None:
    """NVML and the handle of one of CUDA's devices; None where they say no energy."""
    try:
        library = importlib.import_module("pynvml")
        import torch

        library.nvmlInit()
        identity = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = library.nvmlDeviceGetHandleByUUID(identity)
        library.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # whatever NVML raises where there is no driver, no device, or no counter
        return None
    return library, handle
