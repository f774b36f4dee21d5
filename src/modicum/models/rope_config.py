"""Rotary positions as config.json spells them: the old two fields and transformers 5's one.

A file may hold both spellings. They are read in the order in which transformers 4 and 5 read them:
`rope_scaling` before `rope_parameters`, and a base inside of the one that is read before the base
next to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.models.config_checks import NotBuiltIn

ROPE_TYPES = ("default", "linear", "llama3")
_NUMBERS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def rope_from_hf(
    raw: Mapping[str, Any], file: str | Path | None = None
) -> tuple[float, dict[str, Any] | None]:
    """The base (theta) and the scaling, None for plain rotary positions.

    Raises:
        NotBuiltIn: the type of scaling is not supported.
        InputError: one of its numbers is missing.
    """
    place = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(place) or {}
    if not isinstance(given, Mapping):
        raise InputError("must be a JSON object", file=file, field=place, value=given)
    entry = dict(given)
    theta = entry.pop("rope_theta", raw.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise InputError("must be a number", file=file, field="rope_theta", value=theta)
    nested = next((key for key, value in entry.items() if isinstance(value, Mapping)), None)
    if nested is not None:
        raise NotBuiltIn(
            "rotary positions that differ from layer to layer are not supported",
            file=file,
            field=f"{place}.{nested}",
        )
    legacy = entry.pop("type", "default")
    kind = entry.pop("rope_type", legacy)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise NotBuiltIn(
            "this scaling of rotary positions is not supported",
            file=file,
            field=f"{place}.rope_type",
            value=kind,
            allowed=", ".join(ROPE_TYPES),
        )
    partial = entry.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise NotBuiltIn(
            "rotary positions on a part of each head are not supported",
            file=file,
            field="partial_rotary_factor",
            value=partial,
            allowed="1.0",
        )
    if kind == "default":
        return float(theta), None
    if kind == "llama3":
        original = "original_max_position_embeddings"
        if original in raw:  # which some files hold next to the entry, and transformers takes then
            entry[original] = raw[original]
        entry.setdefault(original, raw.get("max_position_embeddings"))
    for name in _NUMBERS[kind]:
        value = entry.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InputError(
                "must be a number above zero", file=file, field=f"{place}.{name}", value=value
            )
    return float(theta), {"rope_type": kind, **{name: entry[name] for name in _NUMBERS[kind]}}


def rope_to_hf(theta: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """The two fields of config.json that transformers 4 and 5 both read."""
    return {"rope_theta": theta, "rope_scaling": dict(scaling) if scaling else None}
