"""Tensors of an adapter that are a function of the base weight, such as a basis of its directions.

They are in no state dict and no file: where the weight is, they are made again. What is kept are
two numbers that say which they were (`deriving_layer.fingerprint`), so that another weight, or
another library's choice among bases that are as good, is noticed before anything is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from modicum.adapters import base_weights
from modicum.adapters.adapted_layer import AdaptedLayer
from modicum.adapters.attachment import Attachment
from modicum.adapters.base import ReadWeight
from modicum.adapters.deriving_layer import DerivingLayer
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.turns import by_turns


def check_derivable(name: str, base: nn.Module) -> None:
    """Make sure that a layer still has the weight that its adapter's tensors are a function of.

    Raises:
        InputError: it is quantized.
    """
    if not base_weights.holds_its_weight(base):
        raise InputError(
            "its base is quantized, and the adapter computes a basis of the full-precision weight; "
            "give `weights`, a function from a layer's name to its weight in the model's file",
            value=name,
        )


@torch.no_grad()
def derive(attached: Attachment, kept: Mapping[str, Tensor] | None, ranks: Ranks | None) -> None:
    """Fill what an adapter's layers derive from their weights; ranks take turns and share it.

    Args:
        kept: by the model's names, what a file or checkpoint has of the adapter.

    Raises:
        InputError: a base is quantized, and nobody gives the full-precision weight; a weight is not
            finite; or what is derived is not what `kept` is for.
    """
    layers = {name: layer for name, layer in attached.layers() if isinstance(layer, DerivingLayer)}
    readers = {n: _reader(attached, n, layer) for n, layer in layers.items()}
    for name, layer in layers.items():
        if readers[name] is None and not layer.of_held:
            check_derivable(name, attached.model.get_submodule(name))

    def read(name: str, mine: bool) -> Tensor | None:
        # A weight that is sharded over ranks is gathered by all; a reader gives it to who asks.
        reader = readers[name]
        return _weight(attached, name, reader) if mine or reader is None else None

    def make(name: str, weight: Tensor) -> Mapping[str, Tensor]:
        base_weights.check_finite(weight, name)
        return layers[name].derive(weight)

    for name, values in by_turns(list(layers), make, ranks or Ranks(), read=read):
        layer = layers[name]
        if kept is not None:
            layer.check_fingerprint(kept.get(attached.model_name(f"{name}.fingerprint")), values)
        layer.put(values)


def _reader(attached: Attachment, name: str, layer: DerivingLayer) -> ReadWeight | None:
    """What gives W; None: the layer itself, as where it is factors and no file has a matrix."""
    base = attached.model.get_submodule(name)
    factors = not base_weights.is_exact(base) and base_weights.holds_its_weight(base)
    return None if layer.of_held or factors else attached.weights


def _weight(attached: Attachment, name: str, reader: ReadWeight | None) -> Tensor:
    """W of a layer [out, in] as it is without adapters that have a part of it."""
    base, site = attached.model.get_submodule(name), attached.sites[name]
    if reader is not None:
        return base_weights.given(reader, site, base)
    assert isinstance(base, AdaptedLayer)
    weight, rewriter = base_weights.read(base, site), base.rewriter()
    return weight if rewriter is None else weight + rewriter.taken()
