"""Optimizers: what turns gradients into new weights, and the state that this takes."""

from __future__ import annotations

from modicum.core.exports import Exports

EXPORTS = Exports(
    __name__,
    {
        "GradientTransform": "transform",
        "MatrixOptimizer": "base",
        "TransformContext": "transform",
        "step_in_backward": "backward",
    },
)
__getattr__, __dir__ = EXPORTS.load, EXPORTS.names
