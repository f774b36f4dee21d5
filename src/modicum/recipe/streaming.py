"""What a recipe must not ask of data that is read as training asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modicum.core.errors import InputError

if TYPE_CHECKING:
    from modicum.recipe.recipe import Recipe


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
    bare = any(each.weight is None for each in data.sources)
    asked: dict[str, str | bool] = {
        "task.method": (recipe.task or {}).get("method", "causal_lm") != "causal_lm"
        and "streams text to write alone; leave data.streaming out",
        "training.epochs": recipe.training.epochs is not None
        and "how many rows a stream has is not known before all of it was read; give "
        "training.steps instead",
        "data.sources.0.weight": bare
        and "how many rows a stream has is not known, so what is streamed is mixed by weight; "
        "give each source one",
        "compress.method": recipe.compress is not None
        and "looks at data before training, and a stream begins with it; set data.streaming to "
        "false, or compress in a run of its own",
        "adapter.method": recipe.adapter is not None
        and "prepares_from_data" in recipe.methods()["adapter"].traits(recipe.fields("adapter"))
        and "looks at data before training, and a stream begins with it; set data.streaming to "
        "false, or take another adapter",
    }
    for field, refused in asked.items():
        if isinstance(refused, str):
            raise InputError(refused, field=field)
