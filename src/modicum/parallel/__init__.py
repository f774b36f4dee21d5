"""Several processes: how ranks share a model and its work, and how they are started here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.parallel.launch import Supervisor
    from modicum.parallel.rank_environment import RankPlace
    from modicum.parallel.replicated import Replicated
    from modicum.parallel.sharded import Sharded
    from modicum.parallel.zero import Zero

_HOMES = {
    "RankPlace": "rank_environment",
    "Replicated": "replicated",
    "Sharded": "sharded",
    "Supervisor": "launch",
    "Zero": "zero",
}
__all__ = ["RankPlace", "Replicated", "Sharded", "Supervisor", "Zero"]


def __getattr__(name: str) -> object:
    # Ranks are started by a process that never imports torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
