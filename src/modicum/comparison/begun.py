"""What a folder's comparison began with, where free memory would decide otherwise by now.

Which sides fit, and how large a budget in bytes makes them, follows from the memory that is free at
the moment. A comparison that is resumed keeps the sides and the sizes of its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.comparison.budgets import SharedBudget, Sized, set_in, spent_of
from modicum.comparison.sides import RecipeSide
from modicum.comparison.study_file import FORMAT, STUDY, is_damaged, refused_at_first
from modicum.core.files import read_json

if TYPE_CHECKING:
    from modicum.planner import Plan
    from modicum.recipe import Recipe


@dataclass(frozen=True)
class BegunComparison:
    """The comparison of a folder; empty where there is none, or none that can be read.

    Args:
        refused: why sides took no part when it began, by their names.
        taking_part: the names of the others.
        given: the recipes by side, the budget, which sides have no size (`references`), and why
            some are not at the budget (`unequal`).
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    taking_part: frozenset[str] = frozenset()
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path | None) -> BegunComparison:
        """The comparison that a folder holds; of None, and of a protocol's folder, an empty one.

        Raises:
            InputError: its record cannot be read.
        """
        file = None if folder is None else folder / STUDY
        if file is None or not file.exists() or is_damaged(file):
            return cls()
        found = read_json(file)
        identity = found.get("identity")
        if found.get("format") != FORMAT or not isinstance(identity, dict):
            return cls()
        refused = refused_at_first(found)
        taking_part = frozenset(identity.get("sides") or ()) - frozenset(refused)
        return cls(refused, taking_part, identity.get("given") or {})

    def side(self, side: RecipeSide) -> RecipeSide:
        """The side as it was then: refused, or taking part whether it fits now or not."""
        if side.name in self.refused:
            return replace(side, refused=self.refused[side.name])
        return replace(side, began=side.name in self.taking_part)

    def size(
        self,
        side: RecipeSide,
        budget: SharedBudget,
        path: str | None,
        plan: Callable[[Recipe], Plan],
    ) -> Sized | None:
        """How large the same budget made a side then; None where that is not known.

        Args:
            path: the recipe's path of the size; None: the side has none.
            plan: of a recipe, whether it fits into memory or not.

        Raises:
            InputError: a recipe of this size cannot be planned.
        """
        then = (self.given.get("recipes") or {}).get(side.name)
        if side.recipe is None or then is None or self.given.get("budget") != budget.said:
            return None
        settings: dict[str, Any] = {}
        if path is not None:
            section, _, name = path.partition(".")
            value = (then.get(section) or {}).get(name)
            if value is None:
                return None
            settings = {path: value}
        spent = spent_of(plan(set_in(side.recipe, settings)), budget.kind)
        reference = side.name in (self.given.get("references") or ())
        unequal = (self.given.get("unequal") or {}).get(side.name, "")
        return Sized(settings, spent, reference, unequal)
