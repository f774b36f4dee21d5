"""Smaller models of the same architecture: fewer blocks, fewer heads, fewer tokens, fewer experts.

What makes an architecture what it is stays: which kinds of blocks it has, widths of heads, groups
of keys and values, windows, scales.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from modicum.models.transformers.kinds import described

# Within how many tokens all is alike: the window, tokens that are looked at, positions whose
# attention has one temperature. Fewer than a small model is tried with.
_WINDOW = 4
_WINDOWS = ("sliding_window", "index_topk", "floor_scale")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_LIKE_WIDTH = ("word_embed_proj_dim", "embedding_size", "d_model")
# Experts of a layer, and how many of them a token chooses.
_AT_MOST = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_topk"), 2),
}
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_EXPERT_INNER = ("moe_intermediate_size", "shared_expert_intermediate_size")
_MOST_BLOCKS = 8


def one_block(raw: Mapping[str, Any], vocabulary_size: int) -> dict[str, Any]:
    """The config.json of the model's first block alone, with so many tokens."""
    made = described(raw)
    _fewer_blocks(made, 1)
    _fewer_tokens(made, vocabulary_size)
    return _written(raw, made)


def reduced(raw: Mapping[str, Any], tokens: int, *, narrow: bool) -> dict[str, Any]:
    """The config.json of a small model that has a block of each kind of the given one.

    Args:
        tokens: in the vocabulary.
        narrow: whether blocks have fewer heads too, and inner widths in proportion.
    """
    made = described(raw)
    _fewer_blocks(made, _kinds(made))
    _fewer_tokens(made, tokens)
    for name in _WINDOWS:
        if getattr(made, name, None):
            setattr(made, name, _WINDOW)
    if narrow:
        _fewer_heads(made)
    return _written(raw, made)


def _written(raw: Mapping[str, Any], made: Any) -> dict[str, Any]:
    return {**made.to_dict(), "model_type": raw["model_type"], "architectures": None}


def _kinds(made: Any) -> int:
    """The fewest first blocks that have all kinds that lists of the configuration name."""
    count = made.num_hidden_layers
    rows = [tuple(map(str, kinds)) for kinds in zip(*_lists(made).values(), strict=True)]
    wanted = max((rows.index(kind) + 1 for kind in set(rows)), default=1)
    return min(count, max(2, wanted), _MOST_BLOCKS)


def _lists(made: Any) -> dict[str, list[Any]]:
    """Lists that have an entry for each block."""
    count = made.num_hidden_layers
    every = made.to_dict().items()
    return {name: value for name, value in every if isinstance(value, list) and len(value) == count}


def _fewer_blocks(made: Any, count: int) -> None:
    lists = _lists(made)
    made.num_hidden_layers = count
    for name, value in lists.items():
        setattr(made, name, copy.copy(value[:count]))


def _fewer_tokens(made: Any, count: int) -> None:
    made.vocab_size = min(made.vocab_size, count)
    for name in _TOKENS:
        setattr(made, name, None)


def _fewer_heads(made: Any) -> None:
    heads, width = made.num_attention_heads, made.hidden_size
    groups = next((n for name in _GROUPS if (n := getattr(made, name, None))), heads)
    fewer_groups = min(groups, 2)
    fewer = fewer_groups * min(heads // groups, 2)
    narrow = width // heads * fewer
    made.num_attention_heads, made.hidden_size = fewer, narrow
    for name in _GROUPS:
        if getattr(made, name, None):
            setattr(made, name, fewer_groups)
    for name in _INNER:
        if isinstance(getattr(made, name, None), int):
            setattr(made, name, 2 * narrow)
    for name in _LIKE_WIDTH:
        if getattr(made, name, None) == width:
            setattr(made, name, narrow)
    _fewer_experts(made, narrow)


def _fewer_experts(made: Any, width: int) -> None:
    for name, most in _AT_MOST.items():
        if isinstance(getattr(made, name, None), int):
            setattr(made, name, min(getattr(made, name), most))
    for name in _EXPERT_INNER:
        if isinstance(getattr(made, name, None), int):
            setattr(made, name, width)
