"""modicum in Python and in notebooks: a call that plans nothing twice, and what a run gives.

    >>> import modicum as m
    >>> plan = m.plan(m.Recipe(data={"path": "chats.jsonl"}))                # doctest: +SKIP
    >>> run = m.train(plan)                                                  # doctest: +SKIP
    >>> run.model, run.tokenizer, run.curves()                               # doctest: +SKIP

Importing this imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.notebook.trained_run import TrainedRun
    from modicum.notebook.training import train

_HOMES = {"TrainedRun": "trained_run", "train": "training"}
__all__ = ["TrainedRun", "train"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'modicum.notebook' has no attribute {name!r}")
    return getattr(importlib.import_module(f"modicum.notebook.{_HOMES[name]}"), name)
