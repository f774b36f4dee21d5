"""`comm: auto`: the plan chooses the exchange by the measured link, among what the recipe lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from modicum.core.contracts.method import NO_SECTION
from modicum.core.errors import InputError
from modicum.recipe.slots import filled, find_in

AUTO = "auto"
_SLOT = "comm"


def is_auto(slot: str, section: Any) -> bool:
    """Whether a section leaves its method to the plan.

    >>> is_auto("comm", {"method": "auto"}), is_auto("comm", {"method": "dear"})
    (True, False)
    """
    return slot == _SLOT and isinstance(section, Mapping) and section.get("method") == AUTO


def listed(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The methods that it names next to those that change no number."""
    return list(section.get("among") or ())


def check_auto(section: Mapping[str, Any], plugins: Iterable[str | Path] = ()) -> None:
    """Refuse an `auto` that lists what is no method of exchanges.

    Raises:
        InputError: names the field.
    """
    known = {"method", "among"}
    for name in section:
        if name not in known:
            raise InputError("unknown field", field=f"{_SLOT}.{name}", candidates=known)
    among = section.get("among")
    among = [] if among is None else among
    if not isinstance(among, list):
        problem = "expected a list of methods"
        raise InputError(problem, field=f"{_SLOT}.among", value=among)
    for place, entry in enumerate(among):
        field = f"{_SLOT}.among.{place}"
        if not isinstance(entry, Mapping):
            raise InputError(NO_SECTION, field=field, value=entry)
        if entry.get("method") == AUTO:
            raise InputError("is the choice itself", field=f"{field}.method", value=AUTO)
        try:
            record = find_in(_SLOT, entry, plugins)
        except InputError as error:
            problem, allowed = error.problem, error.allowed
            place_of = f"{field}.method"
            raise InputError(
                problem, field=place_of, value=entry.get("method"), allowed=allowed
            ) from None
        fields = {key: value for key, value in entry.items() if key != "method"}
        record.validate(fields, prefix=f"{field}.")


def filled_auto(section: Mapping[str, Any], plugins: Iterable[str | Path] = ()) -> dict[str, Any]:
    """The section with every field of what it lists spelled out."""
    among = [
        filled(
            find_in(_SLOT, entry, plugins),
            {key: value for key, value in entry.items() if key != "method"},
        )
        for entry in listed(section)
    ]
    return {"method": AUTO, "among": among}
