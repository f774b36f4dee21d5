"""Optimizers: what turns gradients into new weights, and the state that this takes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.optim.adamw import AdamW
    from modicum.optim.backward import step_in_backward
    from modicum.optim.base import MatrixOptimizer
    from modicum.optim.eva import Eva
    from modicum.optim.galore import GaLore
    from modicum.optim.sgd import SGD
    from modicum.optim.transform import GradientTransform, TransformContext

_HOMES = {
    "AdamW": "adamw",
    "Eva": "eva",
    "GaLore": "galore",
    "GradientTransform": "transform",
    "MatrixOptimizer": "base",
    "SGD": "sgd",
    "TransformContext": "transform",
    "step_in_backward": "backward",
}
__all__ = [
    "SGD",
    "AdamW",
    "Eva",
    "GaLore",
    "GradientTransform",
    "MatrixOptimizer",
    "TransformContext",
    "step_in_backward",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
