"""How large a side is made: as its layers take it, and as a budget lets it be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modicum.comparison.begun import BegunComparison
from modicum.comparison.budgets import SharedBudget, Sized, set_in, sized
from modicum.comparison.sides import RecipeSide, planned
from modicum.comparison.spaces import size_of
from modicum.core.errors import DoesNotFit, InputError
from modicum.planner.planning import plan_anyway

if TYPE_CHECKING:
    from modicum.planner import Plan
    from modicum.recipe import Recipe

NO_LENGTH = {"training.steps": None, "training.epochs": None}
_SMALLER = 64  # sizes that are tried below one that layers do not take


def small_enough(side: RecipeSide, ranks: int) -> tuple[RecipeSide, dict[str, Any]]:
    """A side with a rank above what its layers take, at the largest that they do."""
    path = side.refused_field or ""
    section, _, field = path.partition(".")
    if side.recipe is None or section != side.section:
        return side, {}
    record = side.recipe.methods()[section]
    stated = {**record.defaults, **side.recipe.fields(section)}.get(field)
    if not isinstance(stated, int) or isinstance(stated, bool) or stated < 2:
        return side, {}
    for rank in range(stated - 1, max(0, stated - _SMALLER), -1):
        own = {path: rank}
        made = with_settings(replace(side, refused=None, refused_field=None), own, ranks)
        if made.refused is None:
            return made, own
    return side, {}


def within(
    side: RecipeSide, limit: SharedBudget | None, ranks: int, begun: BegunComparison
) -> tuple[dict[str, Any], RecipeSide, Sized | None]:
    """What a budget settles of a side, the side with its plan, and how large one in bytes made it.

    None where the budget is in something else, or the side does not take part.

    Args:
        begun: the comparison that is resumed, whose sizes are kept: a plan, and with it the bytes
            that a size takes, follows from the memory that is free.
    """
    if side.plan is None or side.recipe is None or limit is None or limit.kind == "seconds":
        return {}, side, None
    if limit.kind == "tokens":
        own: dict[str, Any] = {**NO_LENGTH, "training.tokens": round(limit.amount)}
        return own, with_settings(side, own, ranks), None

    def plan(recipe: Recipe) -> Plan:
        return plan_anyway(recipe, ranks=ranks)[0]

    path, values = size_of(side)
    try:
        found = begun.size(side, limit, path, plan) or sized(side.recipe, limit, path, values, plan)
    except DoesNotFit as error:
        return {}, replace(side, plan=None, refused=str(error), fits=False), None
    except InputError as error:
        return {}, replace(side, plan=None, refused=str(error)), None
    own = dict(found.settings)
    made = with_settings(side, own, ranks)
    return own, made, found if made.refused is None else None


def with_settings(side: RecipeSide, own: Mapping[str, Any], ranks: int = 1) -> RecipeSide:
    """The side with settings in its recipe, and its plan."""
    assert side.recipe is not None
    try:
        return planned(replace(side, recipe=set_in(side.recipe, own)), ranks)
    except InputError as error:
        return replace(side, plan=None, refused=str(error))
