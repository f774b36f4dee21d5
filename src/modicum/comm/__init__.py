"""Exchanges between ranks: when gradients and weights travel, and in how many bytes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.comm.base import Schedule, ScheduleQuery, Wrapped
    from modicum.comm.dear import DeAR
    from modicum.comm.sdp4bit import SDP4Bit

_HOMES = {
    "DeAR": "dear",
    "ScheduleQuery": "base",
    "SDP4Bit": "sdp4bit",
    "Schedule": "base",
    "Wrapped": "base",
}
__all__ = ["DeAR", "SDP4Bit", "Schedule", "ScheduleQuery", "Wrapped"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
