"""The trainer: a plan in, a run folder out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.trainer.loop import train
    from modicum.trainer.resume import continued

_HOMES = {"continued": "resume", "train": "loop"}
__all__ = ["continued", "train"]


def __getattr__(name: str) -> object:
    # A run folder can be looked at without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'modicum.trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"modicum.trainer.{_HOMES[name]}"), name)
