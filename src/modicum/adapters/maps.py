"""The maps of the parts of a model that are one, as those ask who look for units or slices in it.

A model of transformers is mapped as another one of its configuration, without memory: no form,
adapter or shard is on that, and it is mapped once. Any other is mapped as it is without adapters,
once as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modicum.adapters.first_pass import unwatched
from modicum.core.errors import InputError
from modicum.core.layers.layer_sites import Site, survey
from modicum.core.layers.map import MappedSlice, ModelMap, Units, map_of
from modicum.core.layers.map_check import FAILURES
from modicum.core.layers.meta import on_meta
from modicum.core.layers.plain_layers import plain_type


@dataclass(frozen=True)
class MappedPart:
    """A part of a model, its map, and its linear layers; names are those within the part.

    Args:
        path: of the part in the model; "" is the model itself.
    """

    path: str
    map: ModelMap
    layers: Mapping[str, Site]

    def name(self, inner: str) -> str:
        """The model's name of what the part calls `inner`."""
        return f"{self.path}.{inner}".strip(".")


_Read = tuple[ModelMap, Mapping[str, Site]]
_known: weakref.WeakKeyDictionary[nn.Module, list[MappedPart]] = weakref.WeakKeyDictionary()
_by_config: dict[tuple[type[nn.Module], str], _Read | None] = {}


def mapped_parts(model: nn.Module) -> list[MappedPart]:
    """The parts of a model that have a map; none where no map of it is found.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [part.map.mlps[0].neurons.count for part in mapped_parts(model)]
    [8]
    """
    if model not in _known:
        _known[model] = list(_mapped(model))
    return _known[model]


def _mapped(model: nn.Module) -> Iterator[MappedPart]:
    outer: list[str] = []
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        inside = any(not other or path.startswith(f"{other}.") for other in outer)
        if inside or config is None or not hasattr(type(module), "_from_config"):
            continue
        outer.append(path)
        kind: Any = plain_type(module)
        key = kind, str(config)
        if key not in _by_config:
            with on_meta():
                alike = kind(config)
            _by_config[key] = _read(alike)
        if (found := _by_config[key]) is not None:
            yield MappedPart(path, *found)
    if not outer:
        with _without_adapters(model):
            found = _read(model)
        if found is not None:
            yield MappedPart("", *found)


def _read(model: nn.Module) -> _Read | None:
    """The map of a model and its linear layers; None where it has no map."""
    try:
        with torch.device("cpu"):  # a plan attaches where tensors are made without memory
            return map_of(model), survey(model, ["linear"]).sites
    except (InputError, *FAILURES):
        return None


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Layers with adapters are of their own class, for the length of a `with` block."""
    adapted = [(each, type(each)) for each in model.modules() if plain_type(each) is not type(each)]
    with unwatched(model):
        try:
            for module, _ in adapted:
                object.__setattr__(module, "__class__", plain_type(module))
            yield
        finally:
            for module, kind in adapted:
                object.__setattr__(module, "__class__", kind)


@dataclass(frozen=True)
class ReadUnits:
    """Which units the inputs of a layer are.

    Args:
        units: of the model; slices have the model's names.
        channels: int64 [units, inputs of each].
        outputs: of the layer.
    """

    units: Units
    channels: Tensor
    outputs: int


def units_read(model: nn.Module, kind: Literal["neurons", "groups"]) -> dict[str, ReadUnits]:
    """The linear layers whose inputs are neurons, or groups of heads, by the model's map.

    A layer of another size than the map says is none of them, nor are stacked experts.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> {name: tuple(read.channels.shape) for name, read in units_read(model, "neurons").items()}
    {'2': (8, 1)}
    """
    found, there = {}, survey(model, ["linear"]).sites
    for part in mapped_parts(model):
        neurons = [mlp.neurons for mlp in part.map.all_mlps() if not mlp.experts]
        groups = [attention.groups for attention in part.map.all_attentions()]
        for units in neurons if kind == "neurons" else groups:
            for piece in units.readers:
                layer, _, leaf = piece.tensor.rpartition(".")
                site, own = part.layers.get(layer), there.get(part.name(layer))
                if site is None or own is None or site.in_features != own.in_features:
                    continue
                if leaf == "weight" and piece.dim == int(not site.transposed):
                    channels, named = piece.places().reshape(units.count, -1), _named(units, part)
                    found[own.name] = ReadUnits(named, channels, own.out_features)
    return found


def _named(units: Units, part: MappedPart) -> Units:
    """The same units, with the names that the model has."""

    def outer(pieces: tuple[MappedSlice, ...]) -> tuple[MappedSlice, ...]:
        return tuple(replace(piece, tensor=part.name(piece.tensor)) for piece in pieces)

    name = part.name(units.name)
    return replace(units, name=name, makers=outer(units.makers), readers=outer(units.readers))
