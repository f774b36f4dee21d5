"""Recipes as nested dictionaries of plain values: how a field is set, what differs between two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modicum.core.errors import InputError


def assign(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path in nested dictionaries, making the sections on its way.

    Raises:
        InputError: the path goes through something that is no section.
    """
    *sections, last = path.split(".")
    place: Any = values
    for depth, name in enumerate(sections):
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            raise InputError("is a value, not a section", field=".".join(sections[: depth + 1]))
    place[last] = value


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What changed between two plain recipes, one line a field: `training.steps: 10 -> 20`."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return lines
