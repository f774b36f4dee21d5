"""Policies on the activations that training keeps for its backward pass."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.memory.activations import Activations
    from modicum.memory.base import ActivationContext, ActivationPolicy
    from modicum.memory.comet import COMET

_HOMES = {
    "COMET": "comet",
    "ActivationContext": "base",
    "ActivationPolicy": "base",
    "Activations": "activations",
}
__all__ = ["COMET", "ActivationContext", "ActivationPolicy", "Activations"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
