"""Why a field of a recipe has its value: the planner's choice, the user's, or a default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.planner.auto_exchange import FIELD as EXCHANGE
from modicum.planner.choose import (
    ASYNCHRONOUS,
    COMPILE,
    DEVICE,
    MICRO,
    RECOMPUTE,
    STRATEGY,
    strategy_of,
)
from modicum.planner.earlier_adapter import START
from modicum.planner.length import STEPS, WARMUP_STEPS
from modicum.planner.plan import Plan
from modicum.planner.precision import EXPORT, FORM, PRECISION
from modicum.planner.question import Question
from modicum.planner.save_interval import EVERY
from modicum.recipe import Recipe

_TRIED = (MICRO, RECOMPUTE, STRATEGY, ASYNCHRONOUS)
# What a plan fills where a recipe leaves it open. A row of any other field is a remark on it.
_OPEN = {*_TRIED, COMPILE, DEVICE, EVERY, EXCHANGE, EXPORT, FORM, PRECISION}


def why(asked: Question, made: Plan, field: str, written: str | None = None) -> JsonObject:
    """Where a field's value is from, and of a choice all candidates with their costs.

    What the plan remarks on a value that it did not choose is a `note`.

    Args:
        field: dotted, as in the recipe or in the plan's choices.
        written: where the user wrote it, or what it is derived from (`Plan.derived`); None:
            nowhere.

    Raises:
        InputError: the recipe has no such field, and the plan no such choice.
    """
    known, rows = fields_of(asked.recipe), {row["field"]: row for row in made.choices}
    chosen, remark = _choice(field, known, rows), rows.get(field)
    if chosen is None and field not in known:
        raise InputError(
            "the recipe has no such field",
            field="--why",
            value=field,
            allowed="a field of the recipe, such as training.micro_batch_size",
            candidates=[*known, *rows],
        )
    note: JsonObject = {} if remark is None or remark is chosen else {"note": remark["why"]}
    if chosen is not None:
        row: JsonObject = {"field": field, "value": chosen["value"], "by": "the planner"}
        row["why"] = chosen["why"]
        if field in _TRIED:
            row["candidates"] = candidates(asked, made)
        return row | note
    row = {"field": field, "value": known[field]}
    begun = known if asked.written is None else fields_of(asked.written)
    if field not in made.derived and known[field] != begun.get(field):
        section = field.partition(".")[0]
        cause = rows.get(START if section == "adapter" else section)
        why = "it follows from what the recipe leaves open" if cause is None else cause["why"]
        return row | {"by": "the planner", "why": why} | note
    if (source := made.derived.get(field)) is not None:
        value = {STEPS: made.length.steps, WARMUP_STEPS: made.length.warmup}[field]
        return row | {"by": "you", "value": value, "why": _said(source.why, written)} | note
    if written is not None:
        return row | {"by": "you", "why": f"written in {written}"} | note
    return row | {"by": "default", "why": "the recipe says nothing of it"} | note


def _choice(
    field: str, known: Mapping[str, Any], rows: Mapping[str, JsonObject]
) -> JsonObject | None:
    """The row of what the planner chose: the field's own, or its section's that names a method."""
    if field in rows and (field in _OPEN or field not in known):
        return rows[field]
    section, _, last = field.rpartition(".")
    return rows.get(section) if last == "method" and section in _OPEN else None


def _said(why: str, written: str | None) -> str:
    return why if written is None else f"{why}; written in {written}"


def candidates(asked: Question, made: Plan) -> list[JsonObject]:
    """All choices that the recipe leaves open, in the planner's order, with what each costs.

    The planner takes the first that fits. `peak_bytes` and `process_bytes` are what a plan says of
    them, and `needs_bytes` is the budget that they need, which for a process is more: a part of it
    is kept to spare.
    """
    rows, taken = [], made.prediction.choice
    flops = max(made.prediction.flops, 1)
    for choice in asked.choices(asked.recipe):
        found = asked.predictor(asked.recipe, asked.inputs.config, choice)
        rows.append(
            {
                "micro_batch_size": choice.micro_batch_size,
                "recompute": "blocks" if choice.recompute else "none",
                "strategy": strategy_of(choice.layout),
                "asynchronous": choice.asynchronous,
                "peak_bytes": found.peak_bytes,
                "process_bytes": replace(made, prediction=found).process_bytes,
                "needs_bytes": asked.room.needed(found),
                "fits": asked.room.holds(found),
                "work": found.flops / flops,
                "wire_bytes": found.wire_bytes,
                "chosen": choice == taken,
            }
        )
    return rows


def fields_of(recipe: Recipe) -> dict[str, Any]:
    """Every field of a recipe by its dotted name, sections that are not there by theirs.

    >>> fields_of(Recipe())["training.batch_size"], fields_of(Recipe())["adapter"]
    (32, None)
    """
    found: dict[str, Any] = {}

    def add(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                add(value, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = value

    add(recipe.plain(), "")
    return found
