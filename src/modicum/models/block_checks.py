"""Whether what a plan gives blocks of their own can be built in a decoder. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from modicum.core.errors import InputError
from modicum.core.layers.block_plan import check_heads
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.wiring import SkipsTooFar, streams

if TYPE_CHECKING:
    from modicum.models.config import ModelConfig


def checked_blocks(config: ModelConfig) -> FormPlan:
    """The configuration's plan of forms, without the widths that are the model's own.

    Raises:
        InputError: it names no block, heads cannot share kv heads, or a branch skips too many.
    """
    known = [prefix.removesuffix(".") for prefix in config.block_prefixes()]
    for name in config.forms.blocks:
        if name not in known:
            problem = "gives blocks of the model what is theirs, and this names none"
            field = f"forms.blocks.{name}"
            raise InputError(problem, field=field, candidates=known, word=name)
    for layer, name in enumerate(known):
        try:
            check_heads(config.heads_of(layer), config.kv_heads_of(layer))
        except InputError as error:
            raise error.within(f"forms.blocks.{name}") from None
    try:
        streams(config.skips())
    except SkipsTooFar as error:
        block, branch = known[error.branch // 2], ("mixer", "mlp")[error.branch % 2]
        raise error.located(field=f"forms.blocks.{block}.{branch}_skips") from None
    own = {"heads": config.heads, "kv_heads": config.kv_heads, "mlp_width": config.mlp_width}
    blocks = config.forms.blocks
    return config.forms.with_blocks({name: block.without(**own) for name, block in blocks.items()})


def with_common_width(config: ModelConfig) -> ModelConfig:
    """The same shape, with an inner width that all blocks have as the model's own.

    Then no block differs in it, and what knows one width for all reads the model.
    """
    widths = {config.mlp_width_of(layer) for layer in range(config.layers)}
    return replace(config, mlp_width=widths.pop()) if len(widths) == 1 else config
