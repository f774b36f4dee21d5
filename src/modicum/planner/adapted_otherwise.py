"""Layers on which a recipe's adapter is another method than it says, as rows of the plan."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from modicum.adapters.base import Adapter
from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.core.layers.meta import on_meta
from modicum.recipe import Recipe
from modicum.tasks import AnyTask

INSTEAD = "adapter.instead"
_NAMED = 4


def rows_of_instead(recipe: Recipe, task: AnyTask, config: Any) -> list[JsonObject]:
    """A row for the layers that have something instead of the adapter's method, with the reasons.

    Raises:
        InputError: a target names no layer, or sizes do not fit.
    """
    adapter = recipe.method("adapter")
    if not isinstance(adapter, Adapter) or type(adapter).instead is Adapter.instead:
        return []
    with on_meta():
        model = task.model(config)
        try:
            sites = adapter.sites(model)
        except InputError as error:
            raise error.within("adapter") from None
    found = {site.name: why for site in sites if (why := adapter.instead(site)) is not None}
    if not found:
        return []
    by_reason = sorted(found.items(), key=lambda item: item[1])
    reasons = [
        f"{why}: {_listed([name for name, _ in group])}"
        for why, group in groupby(by_reason, key=lambda item: item[1])
    ]
    value = f"{len(found)} of {len(sites)} layers"
    return [{"field": INSTEAD, "value": value, "why": "; ".join(reasons)}]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
