"""What `training.precision` and `export.dtype` mean where they are auto, by the model's files.

Frozen weights stay what the files hold: in bf16 products are computed in that, in fp16 the weights
have the form `fp16`, which computes in fp32. Nothing is ever rounded by `auto`. Trained weights are
fp32 in any case, factors of adapters too, since an update is as a rule smaller than half a step of
bf16 and would be lost.
"""

from __future__ import annotations

from collections.abc import Collection

from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.recipe import Recipe

PRECISION, FORM, EXPORT = "training.precision", "linear", "export.dtype"
FP16 = "fp16"
_DTYPES = {"BF16": "bfloat16", "F16": "float16"}


def settled(recipe: Recipe, dtypes: Collection[str]) -> tuple[Recipe, list[JsonObject]]:
    """The recipe with its precision, and the choices as rows where the files hold not only fp32.

    Args:
        dtypes: of the tensors in the model's files, by safetensors' names; empty for a new model.
    """
    if recipe.training.precision != "auto":
        return recipe, []
    value, why = _chosen(dtypes, adapted=recipe.adapter is not None)
    shown = bool(set(dtypes) - {"F32"})
    made, rows = recipe.changed(training__precision=value), []
    if shown:
        rows.append({"field": PRECISION, "value": value, "why": why})
    if set(dtypes) == {"F16"} and (formed := _in_fp16(made)) is not None:
        made = formed
        rows.append(
            {"field": FORM, "value": FP16, "why": "frozen weights stay as the files hold them"}
        )
    return made, rows


def _in_fp16(recipe: Recipe) -> Recipe | None:
    """The recipe with frozen layers in fp16; None where it has another form, or cannot have it."""
    adapter = recipe.methods().get("adapter")
    if adapter is None or recipe.linear is not None or "rewrites_base" in adapter.info.traits:
        return None
    try:
        return recipe.changed(linear={"method": FP16})
    except InputError:  # something else in it needs dense layers
        return None


def _chosen(dtypes: Collection[str], *, adapted: bool) -> tuple[str, str]:
    held = ", ".join(sorted(dtypes))
    if not adapted:
        return "fp32", f"all weights are trained, in fp32 whatever the files hold ({held})"
    if set(dtypes) == {"BF16"}:
        return "bf16", "frozen weights stay bf16, as the files hold them; what is trained is fp32"
    if "F16" in dtypes:
        why = "products in fp16 need a loss scaler, and bf16 rounds what the files hold"
        return "fp32", f"{why} ({held})"
    return "fp32", f"the files hold {held}, and nothing is rounded unasked"


def exported_dtype(recipe: Recipe, dtypes: Collection[str]) -> str:
    """What the exported weights are rounded to, as torch calls it.

    Args:
        dtypes: as `settled`.

    >>> exported_dtype(Recipe(), {"BF16"}), exported_dtype(Recipe(), {"BF16", "F32"})
    ('bfloat16', 'float32')
    """
    asked = recipe.export.dtype
    if asked != "auto":
        return asked
    own = next(iter(dtypes)) if len(dtypes) == 1 and recipe.adapter is None else ""
    return _DTYPES.get(own, "float32")


def export_rows(recipe: Recipe, dtypes: Collection[str], *, rounds: bool) -> list[JsonObject]:
    """The dtype of the export as a row, where the recipe leaves it open and it is not float32.

    Args:
        dtypes: as `settled`.
        rounds: whether the task exports in other dtypes.

    Raises:
        InputError: the recipe asks for a dtype that is not written.
    """
    asked, value = recipe.export.dtype, exported_dtype(recipe, dtypes)
    if value == "float32":
        return []
    if recipe.adapter is not None or not rounds:
        what = "an adapter is" if recipe.adapter is not None else "models of this task are"
        problem = f"{what} exported in fp32; leave this out"
        raise InputError(problem, field=EXPORT, value=asked, allowed="auto, float32")
    if asked != "auto":
        return []
    why = "as the base's files hold it; the trained fp32 weights are in the checkpoint"
    return [{"field": EXPORT, "value": value, "why": why}]
