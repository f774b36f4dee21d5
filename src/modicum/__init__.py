"""modicum trains, adapts, compresses and serves models within a stated budget.

`modicum.train(modicum.plan(modicum.Recipe(...)))` is a full run; `modicum.adapters` and the other
rooms hold methods that work in anybody's PyTorch script. Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum import adapters as adapters
    from modicum import checkpoint as checkpoint
    from modicum import comm as comm
    from modicum import compress as compress
    from modicum import data as data
    from modicum import linears as linears
    from modicum import memory as memory
    from modicum import models as models
    from modicum import optim as optim
    from modicum import parallel as parallel
    from modicum import serve as serve
    from modicum import tasks as tasks
    from modicum.comparison.by_protocol import compare_by_protocol as compare_by_protocol
    from modicum.comparison.comparing import compare as compare
    from modicum.notebook import TrainedRun as TrainedRun
    from modicum.notebook import train as train
    from modicum.planner import Plan as Plan
    from modicum.planner import plan as plan
    from modicum.recipe import Recipe as Recipe

__version__ = "0.1.0"

_HOMES = {
    "Plan": "modicum.planner",
    "Recipe": "modicum.recipe",
    "compare": "modicum.comparison.comparing",
    "compare_by_protocol": "modicum.comparison.by_protocol",
    "plan": "modicum.planner",
    "TrainedRun": "modicum.notebook",
    "train": "modicum.notebook",
}
_ROOMS = (
    "adapters",
    "checkpoint",
    "comm",
    "compress",
    "data",
    "linears",
    "memory",
    "models",
    "optim",
    "parallel",
    "serve",
    "tasks",
)

__all__ = [
    "Plan",
    "Recipe",
    "TrainedRun",
    "__version__",
    "adapters",
    "checkpoint",
    "comm",
    "compare",
    "compare_by_protocol",
    "compress",
    "data",
    "linears",
    "memory",
    "models",
    "optim",
    "parallel",
    "plan",
    "serve",
    "tasks",
    "train",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"modicum.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'modicum' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
