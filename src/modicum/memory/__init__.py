"""Policies on the activations that training keeps for its backward pass."""

from __future__ import annotations

from modicum.core.exports import Exports

EXPORTS = Exports(
    __name__,
    {
        "ActivationContext": "base",
        "ActivationPolicy": "base",
        "Activations": "activations",
    },
)
__getattr__, __dir__ = EXPORTS.load, EXPORTS.names
