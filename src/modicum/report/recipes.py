"""Recipes for people: what differs from the defaults first, and what differs between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from modicum.core.errors import ModicumError
from modicum.core.files import JsonObject
from modicum.recipe import SLOTS, Recipe, methods_for

_ABSENT = object()


@dataclass(frozen=True)
class Field:
    """A field of a recipe.

    Args:
        name: with its sections: `training.steps`.
        value: as the run had it.
        default: what it is where nobody says; None where there is no default or it is not known.
        changed: whether the value is another than the default.
    """

    name: str
    value: Any
    default: Any
    changed: bool


def fields(recipe: JsonObject) -> list[Field]:
    """All fields of a resolved recipe, next to their defaults."""
    defaults = _defaults(recipe)
    found = []
    for name, value in flat(recipe).items():
        default = defaults.get(name, _ABSENT)
        known = None if default is _ABSENT else default
        found.append(Field(name, value, known, changed=default is _ABSENT or value != default))
    return found


def differing(recipes: Sequence[JsonObject]) -> list[tuple[str, list[Any]]]:
    """The fields in which recipes differ, with the value of each; None where one has no such."""
    columns = [flat(recipe) for recipe in recipes]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, [column.get(name) for column in columns]) for name in names]
    return [(name, values) for name, values in rows if any(v != values[0] for v in values)]


def flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe's values by the dotted names of their fields; an empty section is a value.

    >>> flat({"task": None, "data": {"limit": 3}})
    {'task': None, 'data.limit': 3}
    """
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


@cache
def _plain() -> JsonObject:
    return Recipe().plain()


def _defaults(recipe: JsonObject) -> dict[str, Any]:
    """Defaults by field; of a section with a method, the method's own."""
    found = flat(_plain())
    for slot in SLOTS:
        part = recipe.get(slot)
        name = part.get("method") if isinstance(part, dict) else None
        if not isinstance(name, str):
            continue
        of_slot, keep = f"{slot}.", f"{slot}.method"
        found = {k: v for k, v in found.items() if k == keep or not k.startswith(of_slot)}
        found |= {f"{slot}.{key}": value for key, value in _method_defaults(slot, name).items()}
    return found


def _method_defaults(slot: str, name: str) -> JsonObject:
    """The defaults of a method's fields; none of a method that is a plugin's, or gone."""
    record = methods_for(slot).get(name)
    if record is None:
        return {}
    try:
        values = record.model.model_construct().model_dump(mode="json")
    except (ModicumError, ValueError, AttributeError):
        return {}
    return flat(values)
