"""Two plans next to each other: what their recipes say, and what each costs."""

from __future__ import annotations

from typing import Any

from modicum.core.files import JsonObject
from modicum.planner.plan import Plan
from modicum.recipe import differences


def compared(one: Plan, two: Plan, fits: tuple[bool, bool]) -> JsonObject:
    """The differences of two recipes, and pairs of what the plans cost: of one, of two.

    Bytes are of a rank, by part (kind and what it is) and phase, and at the peak of each phase.

    Args:
        fits: whether each keeps its budget.
    """
    first, second = one.row(), two.row()
    return {
        "recipes": differences(one.recipe.plain(), two.recipe.plain()),
        "choices": _choices(first, second),
        "fits": list(fits),
        "costs": _costs(first, second),
        "by_phase": _pairs(first["prediction"]["by_phase"], second["prediction"]["by_phase"]),
        "by_part": _by_part(first, second),
    }


def _choices(first: JsonObject, second: JsonObject) -> JsonObject:
    chosen = [{row["field"]: row["value"] for row in each["choices"]} for each in (first, second)]
    return _pairs(*chosen)


def _costs(first: JsonObject, second: JsonObject) -> JsonObject:
    names = ("peak_bytes", "process_bytes", "wire_bytes", "tokens_per_second", "seconds")
    costs = _pairs(*({n: each["prediction"][n] for n in names} for each in (first, second)))
    parameters = _pairs(first["parameters"], second["parameters"])
    return {f"{name}_parameters": pair for name, pair in parameters.items()} | costs


def _by_part(first: JsonObject, second: JsonObject) -> list[JsonObject]:
    """The parts of both, the largest first."""
    tables = [
        {(row["kind"], row["phase"], row["what"]): row["bytes"] for row in each}
        for each in (first["prediction"]["table"], second["prediction"]["table"])
    ]
    pairs = {key: [table.get(key, 0) for table in tables] for table in tables for key in table}
    ordered = sorted(pairs.items(), key=lambda item: -max(item[1]))
    return [
        {"kind": kind, "phase": phase, "what": what, "bytes": pair}
        for (kind, phase, what), pair in ordered
    ]


def _pairs(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    return {name: [one.get(name), two.get(name)] for name in {**one, **two}}
