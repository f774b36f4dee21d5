"""The sections of a recipe in which a method stands: which ones go where, and their spelling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from modicum.core.contracts.catalog import MethodRecord, catalog, find, of_value
from modicum.core.contracts.method import Method
from modicum.core.errors import InputError

# Each section and the room that its methods come from. A room's first section is the place of all
# its methods whose `info` names no other.
SLOTS: dict[str, str] = {
    "task": "tasks",
    "linear": "linears",
    "adapter": "adapters",
    "optimizer": "optim",
    "transform": "optim",
    "memory": "memory",
    "comm": "comm",
    "compress": "compress",
    "diagnosis": "adapters",
    "watchdog": "comm",
}
# Sections that always have a method, and which one where none is named.
DEFAULTS = {"optimizer": "adamw"}


def slot_of(record: MethodRecord) -> str | None:
    """The section that a method stands in; None where no recipe has a place for it."""
    if record.info.slot:
        return record.info.slot if record.info.slot in SLOTS else None
    return next((slot for slot, room in SLOTS.items() if room == record.room), None)


def methods_for(slot: str, plugins: Iterable[str | Path] = ()) -> dict[str, MethodRecord]:
    """The methods that can stand in a section, by name."""
    return {name: r for name, r in catalog(plugins).items() if slot_of(r) == slot}


def find_in(
    slot: str, value: Mapping[str, Any], plugins: Iterable[str | Path] = ()
) -> MethodRecord:
    """The record of the method that a section names.

    Raises:
        InputError: it names none, or one that does not belong there.
    """
    name = value.get("method", DEFAULTS.get(slot))
    if not isinstance(name, str):
        raise InputError(
            "names no method" if "method" not in value else "expected a method's name",
            field=f"{slot}.method",
            allowed=", ".join(methods_for(slot, plugins)),
        )
    try:
        known = find(name, plugins, SLOTS[slot])
    except InputError as error:
        if error.file is not None:
            raise error.located(field=f"{slot}.method") from None
        # Of a room with several sections, those of this one.
        others = methods_for(slot, plugins)
        raise InputError(
            error.problem,
            field=f"{slot}.method",
            value=name,
            allowed=", ".join(sorted(others)),
            candidates=others,
        ) from None
    if slot_of(known) == slot:
        return known
    own = slot_of(known)
    raise InputError(
        f"stands in the section {own!r}" if own else f"is a {known.info.slot}, no part of a recipe",
        field=f"{slot}.method",
        value=name,
        allowed=", ".join(methods_for(slot, plugins)),
    )


def spelled(value: Method) -> dict[str, Any]:
    """A method's value as a section holds it."""
    fields = value.model_dump(mode="json", exclude_unset=True)
    return {"method": of_value(value).name, **fields}


def filled(record: MethodRecord, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A section with every field spelled out."""
    values = record.model.model_validate(dict(fields)).model_dump(mode="json")
    return {"method": record.name, **values}
