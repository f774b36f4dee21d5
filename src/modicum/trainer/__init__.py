"""The trainer: a plan in, a run folder out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.trainer.loop import train
    from modicum.trainer.resume import continued
    from modicum.trainer.run_metrics import evaluate_run

_HOMES = {"continued": "resume", "evaluate_run": "run_metrics", "train": "loop"}
__all__ = ["continued", "evaluate_run", "train"]


def __getattr__(name: str) -> object:
    # A run folder can be looked at without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'modicum.trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"modicum.trainer.{_HOMES[name]}"), name)
