"""Why a field of a recipe has its value: the planner's choice, the user's, or a default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.planner.choose import ASYNCHRONOUS, MICRO, RECOMPUTE, STRATEGY, choices, strategy_of
from modicum.planner.length import STEPS, WARMUP_STEPS
from modicum.planner.plan import Plan
from modicum.planner.question import Question
from modicum.recipe import Recipe

_CHOSEN = (MICRO, RECOMPUTE, STRATEGY, ASYNCHRONOUS)


def why(asked: Question, made: Plan, field: str, written: str | None = None) -> JsonObject:
    """Where a field's value is from, and of a choice all candidates with their costs.

    Args:
        field: dotted, as in the recipe.
        written: where the user wrote it, or what it is derived from (`Plan.derived`); None:
            nowhere.

    Raises:
        InputError: the recipe has no such field.
    """
    known = fields_of(asked.recipe)
    if field not in known:
        raise InputError(
            "the recipe has no such field",
            field="--why",
            value=field,
            allowed="a field of the recipe, such as training.micro_batch_size",
            candidates=known,
        )
    row: JsonObject = {"field": field, "value": known[field]}
    for choice in made.choices:
        if choice["field"] == field:
            row |= {"by": "the planner", "value": choice["value"], "why": choice["why"]}
            if field in _CHOSEN:
                row["candidates"] = candidates(asked, made)
            return row
    if (source := made.derived.get(field)) is not None:
        value = {STEPS: made.length.steps, WARMUP_STEPS: made.length.warmup}[field]
        return row | {"by": "you", "value": value, "why": _said(source.why, written)}
    if written is not None:
        return row | {"by": "you", "why": f"written in {written}"}
    return row | {"by": "default", "why": "the recipe says nothing of it"}


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
    for choice in choices(asked.recipe, asked.device, asked.ranks):
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
