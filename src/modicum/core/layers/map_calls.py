"""What one forward pass showed: which parameter makes what of which channels.

Knows nothing of how that was seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modicum.core.layers.map_labels import Labels, Origin, Origins


@dataclass
class Product:
    """A product with a parameter: of a linear layer, or a convolution.

    Args:
        weight, bias: names of parameters.
        out_dim, in_dim: dimensions of the weight; `out_places`, `in_places` its places there.
        given: the labels of the input's channels; None where they are not known, for `lost`.
    """

    origin: Origin
    weight: str
    out_dim: int
    out_places: Tensor
    in_dim: int
    in_places: Tensor
    given: tuple[Labels, ...] | None
    lost: str = ""
    bias: str | None = None
    groups: int = 1
    convolution: bool = False


@dataclass
class NormCall:
    """A call of a module with one scale per channel; `origin` None: one per channel of a head."""

    module: str
    origin: Origin | None
    before: Origin | None
    labels: Tensor | None
    shape: torch.Size


@dataclass
class AttentionCall:
    """Softmax of queries and keys times values: labels [heads, width] of each."""

    origin: Origin
    query: tuple[Labels, ...]
    key: tuple[Labels, ...]
    value: tuple[Labels, ...]


@dataclass
class ExpertsCall:
    """A call of a module that holds stacked matrices."""

    module: str
    origin: Origin
    given: tuple[Labels, ...] | None


@dataclass
class Trace:
    """What one forward pass showed."""

    origins: Origins = field(default_factory=Origins)
    products: list[Product] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)
    attentions: list[AttentionCall] = field(default_factory=list)
    experts: list[ExpertsCall] = field(default_factory=list)
    made: list[Origin] = field(default_factory=list)  # what the model gave
    called: list[str] = field(default_factory=list)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
