"""What a recipe must not ask of data that is read as training asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modicum.core.errors import InputError

if TYPE_CHECKING:
    from modicum.recipe.recipe import Recipe

_LOOKS = "looks at data before training, and a stream begins with it; set data.streaming to false"


def check_streaming(recipe: Recipe) -> None:
    """Refuse what needs all of the data at once.

    Raises:
        InputError: names what does, and what to do instead.
    """
    data = recipe.data
    if not data.streaming:
        if data.shuffle_buffer is not None:
            problem = "is for data that is streamed; set data.streaming to true, or leave this out"
            raise InputError(problem, field="data.shuffle_buffer", value=data.shuffle_buffer)
        return
    for field, asked, problem in (
        (
            "task.method",
            (recipe.task or {}).get("method", "causal_lm") != "causal_lm",
            "streams text to write alone; leave data.streaming out",
        ),
        (
            "training.epochs",
            recipe.training.epochs is not None,
            "how many rows a stream has is not known before all of it was read; give "
            "training.steps or training.tokens instead",
        ),
        (
            "data.sources.0.weight",
            any(each.weight is None for each in data.sources),
            "how many rows a stream has is not known, so what is streamed is mixed by weight; "
            "give each source one",
        ),
        (
            "evaluation.rows",
            recipe.evaluation.rows == "all"
            and data.validation_path is None
            and data.validation_fraction > 0,
            "of a part of a stream all rows are known when all of it was read; give a number, or "
            "data of its own in data.validation_path",
        ),
        ("compress.method", recipe.compress is not None, f"{_LOOKS}, or compress in another run"),
        ("adapter.method", _looks_first(recipe), f"{_LOOKS}, or take another adapter"),
    ):
        if asked:
            raise InputError(problem, field=field)


def _looks_first(recipe: Recipe) -> bool:
    """Whether the adapter looks at data before the first update."""
    if recipe.adapter is None:
        return False
    return "prepares_from_data" in recipe.methods()["adapter"].traits(recipe.fields("adapter"))
