"""Compression: trained models made smaller, and trained on to recover."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.compress.base import Compressor
    from modicum.compress.compressed_model import CompressedModel, CompressionReport, load
    from modicum.compress.fwsvd import FWSVD
    from modicum.core.layers.calibration import Calibration, calibrate

_HOMES = {
    "Calibration": "core.layers.calibration",
    "CompressedModel": "compress.compressed_model",
    "Compressor": "compress.base",
    "FWSVD": "compress.fwsvd",
    "CompressionReport": "compress.compressed_model",
    "calibrate": "core.layers.calibration",
    "load": "compress.compressed_model",
}
__all__ = [
    "FWSVD",
    "Calibration",
    "CompressedModel",
    "CompressionReport",
    "Compressor",
    "calibrate",
    "load",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"modicum.{_HOMES[name]}"), name)
