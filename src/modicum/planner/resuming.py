"""What of a run's earlier plans stays when it resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modicum.core.files import JsonObject
from modicum.planner.auto_exchange import FIELD as EXCHANGE
from modicum.planner.choose import COMPILE, DEVICE
from modicum.planner.earlier_adapter import START
from modicum.planner.explained import PRODUCT
from modicum.planner.precision import PRECISION
from modicum.recipe import Recipe
from modicum.tasks.model_origins import PATH

_CARRIED = (COMPILE, DEVICE, EXCHANGE, PATH, PRECISION, PRODUCT, START)


def same_start(recipe: Recipe, ranks: int, row: Mapping[str, Any]) -> bool:
    """Whether a row of plan.jsonl was made for as many ranks, and for what is asked of them."""
    return row.get("ranks", 1) == ranks and row.get(
        "asked", asked_at_start(recipe)
    ) == asked_at_start(recipe)


def carried(rows: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """Of a run's rows of plans, the choices that stay whatever the ranks.

    The device, the precision, how ranks exchange, the adapter that it starts from, whether blocks
    are compiled, and a limit of the micro-batch that the run has met.
    """
    last: list[JsonObject] = list(rows[-1]["choices"]) if rows else []
    return [row for row in last if row["field"] in _CARRIED or "most" in row]


def asked_at_start(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe may be another at each start of a run."""
    asked = recipe.export.dtype
    return {
        **({} if asked == "auto" else {"export": asked}),
        "parallel": recipe.parallel.model_dump(mode="json"),
        "asynchronous": recipe.checkpoint.asynchronous,
    }
