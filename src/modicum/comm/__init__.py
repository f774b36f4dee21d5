"""Exchanges between ranks: when gradients and weights travel, and in how many bytes."""

from __future__ import annotations

from modicum.core.exports import Exports

EXPORTS = Exports(
    __name__,
    {
        "Schedule": "base",
        "ScheduleQuery": "base",
        "Watch": "watching",
        "Wrapped": "base",
        "watch": "watching",
    },
)
__getattr__, __dir__ = EXPORTS.load, EXPORTS.names
