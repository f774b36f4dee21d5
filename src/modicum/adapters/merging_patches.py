"""Folding a patch into a weight, and taking it out again: its entries alone are touched."""

from __future__ import annotations

import torch
from torch import nn

from modicum.adapters.base_weights import at_least_fp32
from modicum.adapters.merged import Merged
from modicum.adapters.patch_places import Spot
from modicum.adapters.patching_layer import PatchingLayer
from modicum.core.ranks.sharding import own_part, whole


@torch.no_grad()
def merge_patch(base: nn.Module, layer: PatchingLayer, before: Merged) -> None:
    """Write a patch into a layer's weight for good, and keep what its entries were."""
    spot, name = own_entries(base, layer), layer.site.name
    values = spot.pick(whole(layer.used_values().detach()))
    before.patches[name] = spot.read()
    total = at_least_fp32(before.patches[name]) + values
    spot.write(total)
    if spot.stored.dtype.itemsize < 4:
        error, size = (spot.read() - total).norm(), values.norm()
        before.rounding[name] = float(error / size) if size else 0.0
    layer.merged = True


@torch.no_grad()
def unmerge_patch(base: nn.Module, layer: PatchingLayer, before: Merged) -> None:
    """Put back what the entries of a merged patch were, to the bit."""
    own_entries(base, layer).write(before.patches[layer.site.name])


def own_entries(base: nn.Module, layer: PatchingLayer) -> Spot:
    """Where a patch's entries are in a layer's weight; of one that is sharded, a rank's own."""
    return layer.places().spot(*own_part(base.get_parameter("weight").detach()))
