"""Merging into slices of fused layers: their rows alone, and of a quantized layer into a dense one.

Rows alone are kept to undo it, as other slices of the layer may be merged by others before.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor, nn

from modicum.adapters import base_weights
from modicum.adapters.adapted_layer import AdaptedLayer
from modicum.adapters.adapter_layer import LayerChange
from modicum.adapters.sites import Site, replace
from modicum.adapters.slices import Slice, holder, layer_name, move_slices
from modicum.core.errors import InputError

Layers = MutableMapping[str, nn.Module]


def unmerged(base: nn.Module, site: Site, layers: Layers) -> nn.Module:
    """What holds a site's weight as it was before a merge: of a slice, one of the layer then."""
    fused = layers.get(layer_name(site)) if site.rows is not None else None
    return base if fused is None else Slice(fused, site)


def merge_slice(
    model: nn.Module, site: Site, weight: Tensor, dense: torch.dtype | None, layers: Layers
) -> Tensor:
    """Put merged rows into a fused layer; the rows that it had, in host memory.

    Args:
        weight: the rows [rows, in].
        dense: the dtype of the dense layer that the fused one becomes; None: it stays.
        layers: by name the layers that became dense, to which this one is added.
    """
    base, name = model.get_submodule(site.name), layer_name(site)
    if dense is not None and name not in layers:
        old = holder(base)
        made = base_weights.dense_layer(
            base_weights.read_layer(base, site), base_weights.read_bias(old), dense
        )
        layers[name] = old
        _exchange(model, name, made.train(old.training))
    before = base_weights.read(base, site).cpu()
    base_weights.write(base, site, weight)
    return before


def unmerge_slice(model: nn.Module, site: Site, rows: Tensor, layers: Layers) -> None:
    """Give a fused layer rows back that it had, or put the layer back that it was."""
    base, name = model.get_submodule(site.name), layer_name(site)
    if name not in layers:
        device = next(holder(base).parameters()).device
        base_weights.write(base, site, rows.to(device))
    elif holder(base) is not layers[name]:
        _exchange(model, name, layers[name])


def check_alone(name: str, base: nn.Module) -> None:
    """Make sure that the layer of a slice can be replaced by another one.

    Raises:
        InputError: an adapter has copies of its parameters.
    """
    if isinstance(base, Slice) and isinstance(holder(base), AdaptedLayer):
        raise InputError(
            "an adapter has copies of parameters of its layer (`also`), which is quantized, so it "
            "cannot become dense; keep the adapter unmerged, and save it",
            value=name,
        )


def check_no_bias(site: Site, change: LayerChange) -> None:
    """Make sure that what is merged into a slice is a change of its weight.

    Raises:
        InputError: it changes the bias too.
    """
    if change.bias is not None:
        problem = "it changes the bias, and slices have none of their own; keep it unmerged"
        raise InputError(problem, value=site.name)


def _exchange(model: nn.Module, name: str, new: nn.Module) -> None:
    move_slices(model.get_submodule(name), new)
    replace(model, name, new)
