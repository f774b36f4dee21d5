"""The sides of a comparison as recipes: one recipe with other methods, or several recipes.

A side of a varied section has that method at its own defaults. Of a section that says what the
model becomes (an adapter, a linear form), what both methods know is kept: targets, a rank. Of an
optimizer nothing is: the numbers of one are not those of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum import recipe_yaml
from modicum.core.errors import DoesNotFit, InputError
from modicum.recipe import SLOTS, Recipe, differences, methods_for
from modicum.recipe.slots import DEFAULTS, find_in

if TYPE_CHECKING:
    from modicum.planner import Plan

NONE = "none"
_KEEPS = ("adapter", "linear", "compress")


@dataclass(frozen=True)
class RecipeSide:
    """A side of a comparison: its recipe and plan, or why there is none.

    Args:
        section: the recipe's section that differs; None: complete recipes are compared.
        own: whether its method is the one that the recipe itself names, so that the rate which the
            recipe states is meant for it.
        refused: why it does not take part, in a sentence.
        refused_field: the field of its recipe that is at fault, where that is known.
        fits: False where it is refused because it is too large.
        began: whether it took part when the comparison began, so that it does now, fit or not.
    """

    name: str
    recipe: Recipe | None
    section: str | None = None
    own: bool = True
    plan: Plan | None = None
    refused: str | None = None
    refused_field: str | None = None
    fits: bool = True
    began: bool = False


def planned(side: RecipeSide, ranks: int = 1) -> RecipeSide:
    """The side with its plan, or with the reason why it has none."""
    from modicum.planner import plan
    from modicum.planner.planning import plan_anyway

    recipe = side.recipe
    if recipe is None or side.refused is not None:
        return side
    side = replace(side, plan=None)  # one that is there is of other settings
    try:
        return replace(side, plan=plan(recipe, ranks=ranks))
    except DoesNotFit as error:
        if side.began:  # whether there is room when its turn comes, its runs find themselves
            return replace(side, plan=plan_anyway(recipe, ranks=ranks)[0])
        return replace(side, refused=str(error), fits=False)
    except InputError as error:
        return replace(side, refused=str(error), refused_field=error.field)


def sides_of(
    recipes: Sequence[str], vary: str | None, overrides: Sequence[str] = ()
) -> list[RecipeSide]:
    """The sides, in the order in which they are named; not yet planned.

    Args:
        recipes: files, or names of recipes that ship with modicum.
        vary: `SECTION=METHOD,METHOD,...`, for a single recipe; `none` leaves a section out.
        overrides: as of `--set`; they hold for every side.

    Raises:
        InputError: fewer than two sides, two that are equal, or something in a recipe is wrong.
    """
    if vary is not None:
        if len(recipes) != 1:
            problem = "changes one recipe, and several are given; leave it out, or name one"
            raise InputError(problem, field="--vary", value=vary)
        found = varied(recipe_yaml.load(recipes[0], overrides, Path.cwd()), vary)
    else:
        loaded = (recipe_yaml.load(file, overrides, Path.cwd()) for file in recipes)
        pairs = zip(_names(recipes), loaded, strict=True)
        found = [RecipeSide(name, recipe) for name, recipe in pairs]
    if len(found) < 2:
        problem = "there is one side, and a comparison needs two"
        hint = "two recipes, or --vary SECTION=METHOD,METHOD"
        raise InputError(problem, value=", ".join(side.name for side in found), allowed=hint)
    _refuse_equal(found)
    return found


def varied(recipe: Recipe, vary: str) -> list[RecipeSide]:
    """The recipe with each of several methods in a section.

    A method that does not combine with the rest of the recipe is a side that is refused.

    Raises:
        InputError: no such section or method, or one that is named twice.

    >>> given = Recipe(model={"path": "base"}, adapter={"method": "lora", "rank": 4})
    >>> [side.recipe.adapter for side in varied(given, "adapter=lora,pissa,none")]
    [{'method': 'lora', 'rank': 4}, {'rank': 4, 'method': 'pissa'}, None]
    """
    slot, separator, listed = vary.partition("=")
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not separator or slot not in SLOTS or not names:
        problem = "names no section of methods; write SECTION=METHOD,METHOD"
        raise InputError(problem, field="--vary", value=vary, allowed=", ".join(SLOTS),
                         candidates=SLOTS, word=slot)  # fmt: skip
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError("names a method twice", field="--vary", value=twice)
    own = getattr(recipe, slot) or {}
    found = []
    for name in names:
        section = _section(recipe, slot, own, name)
        mine = name == own.get("method", DEFAULTS.get(slot, NONE))
        try:
            found.append(RecipeSide(name, recipe.changed(**{slot: section}), slot, mine))
        except InputError as error:
            found.append(RecipeSide(name, None, slot, mine, refused=str(error)))
    return found


def _section(recipe: Recipe, slot: str, own: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """A section with a method in it."""
    if name == NONE:
        if slot in DEFAULTS:
            problem = "this section always has a method"
            raise InputError(problem, field="--vary", value=f"{slot}={NONE}",
                             allowed=", ".join(methods_for(slot, recipe.plugins)))  # fmt: skip
        return None
    if name == own.get("method", DEFAULTS.get(slot)):
        return {**own, "method": name}
    record = find_in(slot, {"method": name}, recipe.plugins)
    kept = own if slot in _KEEPS else {}
    known = {key: value for key, value in kept.items() if key in record.model.model_fields}
    return {**known, "method": name}


def _names(recipes: Sequence[str]) -> list[str]:
    """What the sides are called: the files' names; the paths of those of one name."""
    stems = [Path(file).stem for file in recipes]
    if len(set(stems)) == len(stems):
        return stems
    return [str(Path(file).with_suffix("")).replace("/", "-").strip(".-") for file in recipes]


def _refuse_equal(sides: Sequence[RecipeSide]) -> None:
    there = [(side.name, side.recipe.plain()) for side in sides if side.recipe is not None]
    for place, (name, plain) in enumerate(there):
        for other, its in there[:place]:
            if not differences(plain, its):
                problem = "two sides are equal, so there is nothing to compare"
                raise InputError(problem, value=f"{other}, {name}")
