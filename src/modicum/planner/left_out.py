"""What `targets` of a recipe leave as it is though it holds matrices, as rows of the plan."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.sites import NO_GRADIENT, unreached
from modicum.compress.base import Compressor
from modicum.core.files import JsonObject
from modicum.core.layers.left_out import alike, what_stays
from modicum.linears.base import LinearMethod
from modicum.recipe import Recipe

UNTRAINED = "untrained"  # what an adapter is on though its layer gets no gradient


def left_out_by(recipe: Recipe, model: nn.Module) -> dict[str, Mapping[str, str]]:
    """By section of the recipe what its forms of layers leave dense, with the reasons.

    Args:
        model: without adapters, its layers in their forms or dense still.
    """
    found: dict[str, Mapping[str, str]] = {}
    for section in ("linear", "compress"):
        method = recipe.method(section)
        if isinstance(method, LinearMethod | Compressor):
            found[section] = method.left_out(model)
    return found


def left_out_by_adapter(attached: AttachedAdapter) -> dict[str, Mapping[str, str]]:
    """The same of an adapter, and as `UNTRAINED` its layers that get no gradient."""
    idle = unreached(attached.model)
    untrained = {name: NO_GRADIENT for name in attached.sites if name in idle}
    return {"adapter": attached.left_out, UNTRAINED: untrained}


def rows_of_left_out(recipe: Recipe, found: Mapping[str, Mapping[str, str]]) -> list[JsonObject]:
    """A row for each section whose `targets` leave something out.

    Args:
        found: by section what is left out, by name, with the reason; `UNTRAINED` is of the adapter.
    """
    rows: list[JsonObject] = []
    for name, left in found.items():
        if left:
            section = "adapter" if name == UNTRAINED else name
            targets = ", ".join(getattr(recipe.method(section), "targets", ()))
            why = _stays_untrained(left) if name == UNTRAINED else what_stays(left)
            rows.append({"field": f"{section}.targets", "value": targets, "why": why})
    return rows


def _stays_untrained(idle: Mapping[str, str]) -> str:
    return (
        f"no gradient reaches {', '.join(alike(idle))}, so the adapter changes nothing there; "
        "name these layers in adapter.exclude"
    )
