"""One map of a model: its stream, blocks, heads, neurons, norms, channels, tables and ties.

A model may give its own (`layer_map`). Any other is found: one forward pass shows which layer's
channels come where (`map_trace`), parts are read off that (`map_read`), and each kind of part is
tried on a copy of the module around it (`map_check`). What does not hold is named as unknown, with
the reason, and left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers.map_edits import permute, remove, silence
from modicum.core.layers.map_find import MapFinder
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
    "MappedAttention", "MappedBlock", "MappedConvolution", "MappedMlp", "MappedNorm",
    "MappedSlice", "MappedTable", "ModelMap", "RotaryPairs", "Units", "example_of", "find_map",
    "map_of", "permute", "remove", "silence",
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
    """Trace a model, and try what was found on copies of its parts, in float64.

    Nothing of the model is changed. A model on the meta device can be traced, unless its forward
    pass looks at values, as a mixture of experts does.

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
    names: dict[int, str] = {}
    every: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
        every.setdefault(id(parameter), []).append(name)
    ties = {group[0]: tuple(group) for group in every.values() if len(group) > 1}
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        run = partial(_call, model, example_of(model) if example is None else example)
        found = MapFinder(model, trace(model, names, run), run, ties)
        return found.map()
    finally:
        for module in training:
            module.training = True


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
    device = weight.device
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
