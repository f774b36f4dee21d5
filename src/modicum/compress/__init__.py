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
        "FactorCompressor": "low_rank_base",
        "FittedLayer": "base",
        "LayerCompressor": "base",
        "LowRankCompressor": "low_rank_base",
        "PrunedModel": "pruned_model",
        "PrunedPart": "pruned_parts",
        "PruningReport": "pruned_model",
        "UnitPruner": "unit_pruner",
        "calibrate": "modicum.core.layers.calibration",
        "load": "loading",
    },
)
__getattr__, __dir__ = EXPORTS.load, EXPORTS.names
