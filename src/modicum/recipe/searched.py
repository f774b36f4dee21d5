"""Where in a recipe stands what a search table names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modicum.core.contracts.method_record import MethodRecord
from modicum.core.errors import InputError
from modicum.recipe.slots import SLOTS, slot_of

# The names of a table that are the recipe's own; `core.contracts.search_check` has their bounds.
RECIPE_PATHS = {
    "learning_rate": "training.learning_rate",
    "warmup": "training.warmup_fraction",
    "weight_decay": "optimizer.weight_decay",
    "batch_size": "training.batch_size",
}


def recipe_path(slot: str, name: str) -> str:
    """The field of a recipe that a name in the search table of a section's method means.

    Raises:
        InputError: a recipe has no such section.

    >>> recipe_path("adapter", "rank"), recipe_path("adapter", "learning_rate")
    ('adapter.rank', 'training.learning_rate')
    >>> recipe_path("optimizer", "weight_decay")
    'optimizer.weight_decay'
    """
    if slot not in SLOTS:
        problem = "no section of a recipe has methods of this name"
        raise InputError(problem, value=slot, allowed=", ".join(SLOTS), candidates=tuple(SLOTS))
    return RECIPE_PATHS.get(name) or f"{slot}.{name}"


def search_json(record: MethodRecord) -> dict[str, Any]:
    """A method's search table as plain values, with the field of a recipe that each name means."""
    table: Mapping[str, Any] = record.as_json()["search"]
    slot = slot_of(record)
    fields = {
        name: {"path": recipe_path(slot, name), **each} if slot in SLOTS else each
        for name, each in table["fields"].items()
    }
    return {**table, "fields": fields}
