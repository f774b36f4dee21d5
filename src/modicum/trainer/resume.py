"""A plan for a folder that may hold a run already: choices once made are replayed."""

from __future__ import annotations

from pathlib import Path

from modicum.core.ranks.ranks import Ranks
from modicum.planner import Plan, carried, plan, same_start
from modicum.recipe import Recipe
from modicum.trainer.folder import PLAN, RunFolder
from modicum.trainer.rank_agreement import same_setup


def continued(
    recipe: Recipe, out: str | Path, *, ranks: Ranks | int = 1, restart: bool = False
) -> Plan:
    """The plan of `recipe`, with the choices of the run in `out` where there is one.

    With `restart` that run will make room for another, and its choices do not count.

    With another number of ranks than before, or other settings of `parallel`, choices are made
    anew, within what the run has learnt. `ranks` is as for `plan`.

    Raises:
        InputError: the run there has another recipe, with the difference; or as `plan`.
        DoesNotFit: as `plan`.
    """
    folder = RunFolder(Path(out))
    recipe = recipe.anchored(folder.directory())
    if isinstance(ranks, Ranks):
        same_setup(recipe, ranks)
    rows = []
    if not folder.may_begin(recipe):
        if not restart:
            folder.check_same(recipe)
            rows = folder.rows(PLAN)
        recipe = folder.as_begun(recipe, exchange=not restart)  # the link may be another one now
    if isinstance(ranks, Ranks):
        rows = ranks.broadcast(rows)
    count = ranks if isinstance(ranks, int) else ranks.size
    if rows and same_start(recipe, count, rows[-1]):
        made = plan(recipe, ranks=ranks, replay=rows[-1]["choices"])
    else:
        made = plan(recipe, ranks=ranks, keep=carried(rows))
    return made.replaying(rows)
