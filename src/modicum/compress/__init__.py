"""Compression: trained models made smaller, and trained on to recover."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.compress.base import Compressor
    from modicum.compress.compressed import Compressed, Report
    from modicum.compress.files import load
    from modicum.compress.fwsvd import FWSVD
    from modicum.core.calibration import Calibration, calibrate

_HOMES = {
    "Calibration": "core.calibration",
    "Compressed": "compress.compressed",
    "Compressor": "compress.base",
    "FWSVD": "compress.fwsvd",
    "Report": "compress.compressed",
    "calibrate": "core.calibration",
    "load": "compress.files",
}
__all__ = ["FWSVD", "Calibration", "Compressed", "Compressor", "Report", "calibrate", "load"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"modicum.{_HOMES[name]}"), name)
