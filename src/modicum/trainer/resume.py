"""A plan for a folder that may hold a run already: choices once made are replayed."""

from __future__ import annotations

from pathlib import Path

from modicum.planner import Plan, plan
from modicum.recipe import Recipe
from modicum.trainer.folder import PLAN, RunFolder


def continued(recipe: Recipe, out: str | Path) -> Plan:
    """The plan of `recipe`, with the choices of the run in `out` where there is one.

    Raises:
        InputError: the run there has another recipe, with the difference; or as `plan`.
        DoesNotFit: as `plan`.
    """
    folder = RunFolder(Path(out))
    if folder.may_begin(recipe):
        return plan(recipe)
    folder.check_same(recipe)
    rows = folder.rows(PLAN)
    return plan(recipe, replay=rows[-1]["choices"] if rows else None)
