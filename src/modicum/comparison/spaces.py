"""What is tuned on a side: the search table of its method, as paths of its recipe.

How many fields are tuned follows from the number of trials, so that few trials are not spread over
many fields: the first of a table matter most. What sets a method's size is never tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from modicum.comparison.sides import NONE, RecipeSide
from modicum.core.contracts.search import SearchRange, SearchTable
from modicum.core.contracts.search_ranges import FieldBounds
from modicum.core.errors import InputError
from modicum.recipe import Recipe
from modicum.recipe.searched import recipe_path
from modicum.recipe.slots import find_in

TRIALS_A_FIELD = 4
_SIZES = 1025  # of a size that is no integer: steps of a thousandth of its range
_WHOLE = "optimizer"  # the section whose table is used where complete recipes are compared


@dataclass(frozen=True)
class TunedRange:
    """A range of a search table as the engine asks for it, with the bounds of its field."""

    range: SearchRange
    bounds: FieldBounds

    @property
    def default(self) -> Any:
        """The value of the first trial."""
        return self.range.default

    @property
    def values(self) -> tuple[Any, ...]:
        """Of a choice; else empty."""
        return tuple(getattr(self.range, "values", ()))

    @property
    def low(self) -> float | None:
        """Of a range of numbers."""
        return getattr(self.range, "low", None)

    @property
    def high(self) -> float | None:
        """Of a range of numbers."""
        return getattr(self.range, "high", None)

    @property
    def log(self) -> bool:
        """Whether its scale is logarithmic."""
        return self.range.kind == "log" or bool(getattr(self.range, "log", False))

    def grid(self, n: int) -> tuple[Any, ...]:
        """`n` values, ascending."""
        return tuple(self.range.grid(n))

    def widened(self, value: Any) -> TunedRange:
        """The range farther beyond its end `value`; itself where the field allows nothing there."""
        try:
            return replace(self, range=self.range.widened(value, self.bounds))
        except InputError:
            return self


def space_of(side: RecipeSide, trials: int, tune: tuple[str, ...] = ()) -> dict[str, TunedRange]:
    """The ranges of a side by the paths of its recipe.

    The first trial has the side's defaults: of the section's method its own, and what the recipe
    states where it is of this method.

    Args:
        trials: on each side; a field is tuned for every `TRIALS_A_FIELD` of them.
        tune: names of fields that are tuned instead; a side tunes those that its table has.

    Raises:
        InputError: none of these is in its table.
    """
    if side.recipe is None:
        return {}
    slot = side.section or _WHOLE
    table, record = table_of(side.recipe, slot)
    names = [name for name in tune if name in table.fields]
    if tune and not names:
        known = ", ".join(table.fields)
        raise InputError(f"no search table of {side.name} has such a field", field="--tune",
                         value=",".join(tune), allowed=known, candidates=table.fields)  # fmt: skip
    if not tune:
        names = [*table.tuned][: max(1, trials // TRIALS_A_FIELD)]
    return {
        recipe_path(slot, name): _ranged(side, slot, name, table.fields[name], record)
        for name in names
    }


def refuse_unknown(sides: Sequence[RecipeSide], tune: tuple[str, ...]) -> None:
    """Refuse fields that no side's search table has: nobody would hear that they are not tuned.

    Raises:
        InputError: one of them is such a field.
    """
    tables = [table_of(side.recipe, side.section or _WHOLE)[0] for side in sides if side.recipe]
    known = dict.fromkeys(name for table in tables for name in table.fields)
    for name in tune:
        if name not in known:
            raise InputError("no search table of these sides has such a field", field="--tune",
                             value=name, allowed=", ".join(known), candidates=known)  # fmt: skip


def table_of(recipe: Recipe, slot: str) -> tuple[SearchTable, Any]:
    """The search table of a section's method, and its record; of no method the optimizer's."""
    section = getattr(recipe, slot)
    if section is None or section.get("method") == NONE:
        slot, section = _WHOLE, recipe.optimizer
    record = find_in(slot, section, recipe.plugins)
    return record.search, record


def size_of(side: RecipeSide) -> tuple[str | None, tuple[Any, ...]]:
    """The path of what sets the size of a side's method, and the values that it may have."""
    if side.recipe is None or side.section is None or getattr(side.recipe, side.section) is None:
        return None, ()
    table, record = table_of(side.recipe, side.section)
    if table.size is None:
        return None, ()
    known, bounds = table.fields[table.size], record.bounds(table.size)
    values = tuple(getattr(known, "values", ()))
    if not values:
        wide = _widest(known, bounds)
        whole = isinstance(wide.low, int)
        values = tuple(range(wide.low, wide.high + 1, wide.step)) if whole else wide.grid(_SIZES)
    return recipe_path(side.section, table.size), values


def _widest(known: Any, bounds: FieldBounds) -> Any:
    """The range made wider at both ends while its field allows it, within reason."""
    for end in ("low", "high"):
        for _ in range(3):
            try:
                known = known.widened(getattr(known, end), bounds)
            except InputError:
                break
    return known


def _ranged(side: RecipeSide, slot: str, name: str, known: SearchRange, record: Any) -> TunedRange:
    """The range; its default is what the recipe states for this very method, if it holds that."""
    assert side.recipe is not None
    path, bounds = recipe_path(slot, name), record.bounds(name)
    part, _, field = path.partition(".")
    section: Any = getattr(side.recipe, part) or {}
    if isinstance(section, dict):  # of a method
        stated = section.get(field)
    else:
        there = side.own and field in section.model_fields_set
        stated = getattr(section, field) if there else None
    if stated is not None:
        with suppress(InputError):
            known = replace(known, default=stated)
    return TunedRange(known, bounds)
