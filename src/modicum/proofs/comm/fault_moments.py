"""Moments of a run at which something may happen to a rank, next to those between two steps."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

COMPILING = "compile"
# What begins then, and which time it does; of an update, its fifth, and of saves, the second.
MOMENTS = {
    "start": ("modicum.trainer.rank_watch", "same_setup", 1),
    "data": ("modicum.tasks.causal_lm:CausalLM", "prepare", 1),
    COMPILING: ("modicum.trainer.compile_trial:CompileTrial", "run", 2),
    "rehearsal": ("modicum.trainer.warm_up", "_rehearse", 1),
    "update": ("modicum.core.contracts.strategy:Strategy", "update", 5),
    "save": ("modicum.checkpoint.store:CheckpointStore", "save", 2),
    "writing": ("modicum.checkpoint.saving", "write_part", 2),
}


def strike_at(moment: str, strike: Callable[[], None]) -> None:
    """Have `strike` be called in this process, once, at a moment of its run, one of `MOMENTS`."""
    place, name, number = MOMENTS[moment]
    module, _, kind = place.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, kind) if kind else owner
    plain, calls = getattr(owner, name), itertools.count(1)

    def struck(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            strike()
        return plain(*arguments, **options)

    setattr(owner, name, struck)
