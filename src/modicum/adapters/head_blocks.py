"""The outputs of fused layers that make one head's queries or keys, for optimizers that ask.

Separate layers say it by their names and widths (`core.contracts.parameters`). In a fused one, such
as GPT-2's `c_attn`, Phi-3's `qkv_proj` or NeoX's `query_key_value`, where heads are interleaved,
the model's map does.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from modicum.adapters.maps import MappedPart, mapped_parts
from modicum.core.contracts.ledger import HeadBlocks
from modicum.core.contracts.parameters import note_head_blocks

if TYPE_CHECKING:
    from modicum.core.layers.map import MappedSlice


def note_fused_heads(model: nn.Module) -> dict[str, HeadBlocks]:
    """Find the heads in a model's fused layers, and note them for `optimizer_groups`.

    Of all other layers that store W^T, GPT-2's `Conv1D`, it is noted that outputs are columns.

    Returns:
        By the weight's name the dimension of its outputs, and how many blocks there are of how many
        neighbouring outputs, in turn: a head's queries, or keys, are one, any other output is.
        Nothing for models that are none of transformers', or have no map.
    """
    found: dict[str, HeadBlocks] = {}
    if any(hasattr(type(module), "_from_config") for module in model.modules()):
        with torch.device("cpu"):  # a plan asks where tensors are made without memory
            for part in mapped_parts(model):
                found |= _blocks(part)
    there = {name: parameter.shape for name, parameter in model.named_parameters()}
    fitting = {
        name: blocks
        for name, blocks in found.items()
        if name in there and _outputs(blocks) == there[name][blocks[0]]
    }
    note_head_blocks(model, fitting)
    return fitting


def _outputs(blocks: HeadBlocks) -> int:
    return sum(count * each for count, each in zip(blocks[1::2], blocks[2::2], strict=True))


def _blocks(part: MappedPart) -> dict[str, HeadBlocks]:
    """By the model's name of a weight, its blocks."""
    heads: dict[str, list[MappedSlice]] = {}
    for attention in part.map.all_attentions():
        for piece in (*attention.query, *attention.key):
            heads.setdefault(piece.tensor, []).append(piece)
    found = {}
    for layer, site in part.layers.items():
        pieces = [
            piece for piece in heads.get(f"{layer}.weight", ()) if piece.dim == int(site.transposed)
        ]
        if not site.transposed and sum(p.length for p in pieces) in (0, site.out_features):
            continue  # a layer of its own, or none of an attention
        sizes = _sizes(pieces, site.out_features)
        runs = [(len(list(run)), size) for size, run in groupby(sizes)]
        numbers = (int(site.transposed), *(number for run in runs for number in run))
        found[part.name(f"{layer}.weight")] = numbers
    return found


def _sizes(pieces: list[MappedSlice], outputs: int) -> list[int]:
    """How many outputs each block has, in their order; those of no head are alone."""
    first = torch.arange(outputs)
    for piece in pieces:
        for places in _by_head(piece):
            if int(places[-1] - places[0]) == len(places) - 1:
                first[places] = places[0]
    return torch.unique_consecutive(first, return_counts=True)[1].tolist()


def _by_head(piece: MappedSlice) -> Tensor:
    """The places [heads, head_width] of a slice, ascending in each head."""
    return piece.places().reshape(-1, piece.shape[-1]).sort(1).values
