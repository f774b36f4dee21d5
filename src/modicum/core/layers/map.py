"""One map of a model: its stream, blocks, heads, neurons, norms, channels, tables and ties.

A model may give its own (`layer_map`). Any other is found: one forward pass of a few blocks of each
kind (`block_kinds`) shows which layer's channels come where (`map_trace`), parts are read off that
(`map_read`), and each kind of part is tried on a copy of the module around it (`map_check`). What
holds is carried to the blocks that are alike (`map_carry`). What does not is named as unknown, with
the reason, and left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers.block_kinds import lists_with_neighbours, shortened
from modicum.core.layers.map_carry import NotCarried, carried
from modicum.core.layers.map_check import FAILURES
from modicum.core.layers.map_edits import permute, remove, silence
from modicum.core.layers.map_find import MapFinder
from modicum.core.layers.map_kept import KeptUnits, Reduction
from modicum.core.layers.map_orders import Permutation, UnitOrder, in_front
from modicum.core.layers.map_parts import (
    MappedAttention,
    MappedBlock,
    MappedConvolution,
    MappedMlp,
    MappedNorm,
    MappedSlice,
    MappedTable,
    ModelMap,
    RotaryPairs,
    Units,
)
from modicum.core.layers.map_trace import trace

__all__ = [
    "KeptUnits", "MappedAttention", "MappedBlock", "MappedConvolution", "MappedMlp", "MappedNorm",
    "MappedSlice", "MappedTable", "ModelMap", "Permutation", "Reduction", "RotaryPairs",
    "UnitOrder", "Units", "example_of", "find_map", "in_front", "map_of", "permute", "remove",
    "silence",
]  # fmt: skip


def map_of(model: nn.Module, example: Any = None) -> ModelMap:
    """The map that a model gives by its method `layer_map`, else the one that is found.

    Raises:
        InputError: none is given, and no example of an input is given or known.
    """
    own = getattr(model, "layer_map", None)
    if callable(own):
        given = own()
        assert isinstance(given, ModelMap)
        return given
    return find_map(model, example)


def find_map(model: nn.Module, example: Any = None) -> ModelMap:
    """Trace a few blocks of each kind, try what was found on copies of parts, and carry it on.

    Nothing of the model is changed, and no more of it is allocated than the largest attention or
    MLP once, and all of it where it has at most 2^27 elements. A model on the meta device runs on
    made-up values.

    What is tried is tried once for blocks that are alike, with random weights at the block's own
    sizes: in float64, or in float32 above 2^24 elements. A part of more than 2^30 elements, as the
    experts of the largest mixtures are, is not tried and so named as unknown. Units of the residual
    stream are tried on the shortened model if it has at most 2^27 elements, else they are read off
    and `checked` is False.

    Blocks are alike where their modules, plain values and shapes are; that a block looks at its own
    number alone is not seen. Where a shortened model cannot run, or blocks have to do with others
    than those next to them, all blocks are traced.

    Args:
        example: what the model is called with: a tensor, a tuple or a dict of keywords, of one row
            and a few tokens. None: made from the configuration, for models of transformers, and
            for those that begin with an embedding, a convolution or a linear layer.

    Raises:
        InputError: no example is given or known.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> mlp = find_map(model).mlps[0]
    >>> mlp.up[0].tensor, mlp.neurons.count, mlp.neurons.checked
    ('0.weight', 8, True)
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        given = example_of(model) if example is None else example
        lists = [b for b in lists_with_neighbours(model) if len(b.kept) < len(b.like)]
        if lists:
            found = None
            with suppress(NotCarried, *FAILURES), shortened(model, lists):
                found = carried(_traced(model, given), lists)
            if found is not None:
                return replace(found, ties=tuple(_names(model)[1].values()))
        return _traced(model, given)
    finally:
        for module in training:
            module.training = True


def _traced(model: nn.Module, example: Any) -> ModelMap:
    """The map of a model by tracing all of it."""
    names, ties = _names(model)
    run = partial(_call, model, example)
    return MapFinder(model, trace(model, names, run), run, ties).map()


def _names(model: nn.Module) -> tuple[dict[int, str], dict[str, tuple[str, ...]]]:
    """The first name of each parameter by its id; all names of those that have several."""
    every: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        every.setdefault(id(parameter), []).append(name)
    ties = {group[0]: tuple(group) for group in every.values() if len(group) > 1}
    return {key: group[0] for key, group in every.items()}, ties


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def example_of(model: nn.Module) -> Any:
    """An input of one row for a model, by its configuration or its first layer.

    Raises:
        InputError: neither says what the model reads.

    >>> example_of(nn.Sequential(nn.Embedding(5, 2))).shape
    torch.Size([1, 4])
    """
    weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    device = torch.device("cpu") if weight.is_meta else weight.device
    weight = weight.detach().new_empty(0, device=device)
    config = getattr(model, "config", None)
    reads = getattr(model, "main_input_name", None)
    tokens = torch.arange(2, 6, device=device)[None]
    if reads == "pixel_values":
        size = getattr(config, "image_size", None) or 64
        sides = (size, size) if isinstance(size, int) else tuple(size)
        return {reads: weight.new_ones(1, getattr(config, "num_channels", 3), *sides)}
    if reads == "input_ids":
        vocabulary = int(getattr(config, "vocab_size", 6))
        example = {reads: tokens % vocabulary}
        if getattr(config, "is_encoder_decoder", False):
            example["decoder_input_ids"] = tokens % vocabulary
        known = inspect.signature(model.forward).parameters
        return example | ({"use_cache": False} if "use_cache" in known else {})
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return tokens % module.num_embeddings
        if isinstance(module, nn.Conv2d):
            side = getattr(config, "size", 32)
            return weight.new_ones(1, module.in_channels, side, side)
        if isinstance(module, nn.Linear):
            return weight.new_ones(1, module.in_features)
    raise InputError(
        "gives no example of its input, so its map cannot be found; call `find_map` with one",
        value=type(model).__name__,
    )
