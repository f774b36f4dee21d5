"""What `training.precision: auto` means for a recipe, by what the model's files hold.

Frozen weights stay what the files hold, where products can be computed in that: bf16. Nothing is
ever rounded by `auto`. Trained weights are fp32 in any case, factors of adapters too, since an
update is as a rule smaller than half a step of bf16 and would be lost.
"""

from __future__ import annotations

from collections.abc import Collection

from modicum.core.files import JsonObject
from modicum.recipe import Recipe

PRECISION = "training.precision"


def settled(recipe: Recipe, dtypes: Collection[str]) -> tuple[Recipe, list[JsonObject]]:
    """The recipe with its precision, and the choice as a row where the files hold not only fp32.

    Args:
        dtypes: of the tensors in the model's files, by safetensors' names; empty for a new model.
    """
    if recipe.training.precision != "auto":
        return recipe, []
    value, why = _chosen(dtypes, adapted=recipe.adapter is not None)
    shown = bool(set(dtypes) - {"F32"})
    row: JsonObject = {"field": PRECISION, "value": value, "why": why}
    return recipe.changed(training__precision=value), [row] if shown else []


def _chosen(dtypes: Collection[str], *, adapted: bool) -> tuple[str, str]:
    held = ", ".join(sorted(dtypes))
    if not adapted:
        return "fp32", f"all weights are trained, in fp32 whatever the files hold ({held})"
    if set(dtypes) == {"BF16"}:
        return "bf16", "frozen weights stay bf16, as the files hold them; what is trained is fp32"
    if "F16" in dtypes:
        why = (
            "products in fp16 need a loss scaler; frozen weights of fp16 are held in fp32, exactly"
        )
        return "fp32", f"{why} (bf16 halves them, and rounds)"
    return "fp32", f"the files hold {held}, and nothing is rounded unasked"
