"""Compression: trained models made smaller, and trained on to recover."""

from __future__ import annotations

from modicum.core.exports import Exports

EXPORTS = Exports(
    __name__,
    {
        "Calibration": "modicum.core.layers.calibration",
        "CompressedModel": "compressed_model",
        "CompressionReport": "compressed_model",
        "Compressor": "base",
        "FittedLayer": "base",
        "LowRankCompressor": "low_rank_base",
        "calibrate": "modicum.core.layers.calibration",
        "load": "compressed_model",
    },
)
__getattr__, __dir__ = EXPORTS.load, EXPORTS.names
