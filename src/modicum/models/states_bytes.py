"""What keys and values of a generated text take, by the model's shape alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from modicum.core.layers.meta import on_meta
from modicum.models.decoder_config import DecoderConfig
from modicum.models.decoders import decoder_of
from modicum.models.transformers.model import TransformersDecoder

_READ = 2  # tokens that are read to see how a cache grows


@torch.no_grad()
def states_bytes(config: DecoderConfig, tokens: int, item_bytes: int) -> tuple[int, int]:
    """Bytes of what a decoder remembers of so many tokens of one row, and of its largest layer.

    Caches that hold a window alone count no more than that. Of a model that does not run without
    numbers each block counts a key and a value as wide as its stream.

    Args:
        item_bytes: of a weight's element, in whose dtype keys and values are.

    >>> from modicum.models import ModelConfig
    >>> states_bytes(ModelConfig(vocabulary_size=16, width=8, layers=3, heads=2), 10, 4)
    (1920, 640)
    """
    # Kernels over experts know shapes without numbers in bf16 alone, and some models fp32 alone.
    for dtype in (torch.bfloat16, torch.float32):
        try:
            sizes = [size * item_bytes // dtype.itemsize for size in _sizes(config, tokens, dtype)]
        except Exception:  # whatever a model's own code says of tensors without numbers
            continue
        return sum(sizes), max(sizes, default=0)
    matrices = (shape for shape in config.parameter_shapes().values() if len(shape) == 2)
    # A key and a value as wide as the stream, which the largest matrix leads into or out of.
    each = 2 * min(max(matrices, key=math.prod)) * tokens * item_bytes
    return each * len(config.block_prefixes()), each


def _sizes(config: DecoderConfig, tokens: int, dtype: torch.dtype) -> list[int]:
    """Bytes of each layer's states in a model of this dtype."""
    with on_meta(dtype):
        model = decoder_of(config)
        states: Any = model.new_states(1, tokens)
    if not isinstance(model, TransformersDecoder):  # it has all its room from the first token
        return [sum(tensor.nbytes for tensor in _tensors(one)) for one in states.layers]
    # Outside, as a model may compute with numbers of its own, which are to have some.
    ids = torch.zeros(1, _READ, dtype=torch.int64, device="meta")
    _, states = model.continued(ids, states)
    return [_grown(layer, tokens) for layer in getattr(states.cache, "layers", ())]


def _grown(layer: Any, tokens: int) -> int:
    """Bytes of a layer's cache after so many tokens, of which it has read a few.

    Keys are [1, heads, T, D]; what does not grow is a state.
    """
    held = getattr(layer, "sliding_window", None)
    count = min(tokens, held) if isinstance(held, int) else tokens
    total = 0
    for tensor in _tensors(layer):
        grows = tensor.ndim == 4 and tensor.shape[-2] == _READ
        total += tensor.nbytes * count // _READ if grows else tensor.nbytes
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif hasattr(value, "__dict__"):
        yield from _tensors(list(vars(value).values()))
