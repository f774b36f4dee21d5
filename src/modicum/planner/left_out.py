"""What `targets` of a recipe leave as it is though it holds matrices, as rows of the plan."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from modicum.compress.base import Compressor
from modicum.core.files import JsonObject
from modicum.core.layers.left_out import what_stays
from modicum.linears.base import LinearMethod
from modicum.recipe import Recipe


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


def rows_of_left_out(recipe: Recipe, found: Mapping[str, Mapping[str, str]]) -> list[JsonObject]:
    """A row for each section whose `targets` leave something out.

    Args:
        found: by section what is left out, by name, with the reason.
    """
    return [
        {
            "field": f"{section}.targets",
            "value": ", ".join(getattr(recipe.method(section), "targets", ())),
            "why": what_stays(left),
        }
        for section, left in found.items()
        if left
    ]
