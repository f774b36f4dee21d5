"""Patches of full columns, which may lie apart in a weight or next to each other.

Columns that read units of the model's map are a slice of the weight where those units come first.
The map's orders give a model such a layout, and take it back to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from modicum.adapters.adapted_layer import worn
from modicum.adapters.attachment import Attachment
from modicum.adapters.maps import units_read
from modicum.adapters.patch_places import Columns
from modicum.adapters.patching_layer import PatchingLayer
from modicum.core.errors import InputError
from modicum.core.layers.map import Permutation, UnitOrder, in_front
from modicum.core.ranks.sharding import whole


class ColumnsLayer(PatchingLayer):
    """y = W x + V x_S + b: V [out, c] is added to the c columns S of W.

    Attributes:
        first: where S begins while it is a slice, in `units_in_front`; None: S are the indices.
    """

    first: int | None = None

    def places(self) -> Columns:
        if self.first is None:
            return Columns(self.indices, self.site)
        last = self.first + len(self.indices)
        there, device = torch.int32, self.indices.device
        neighbours = torch.arange(self.first, last, dtype=there, device=device)
        return Columns(neighbours, self.site, self.first)

    def as_lora(self) -> tuple[Tensor, Tensor, float]:
        values = whole(self.values)
        rows = values.new_zeros(values.shape[1], self.site.in_features)
        return rows.scatter_(1, self.indices.long()[:, None], 1.0), values, 1.0


def to_front(attached: Attachment) -> Permutation:
    """The order of a model's units that has those of which an adapter has columns at the front.

    The permuted model computes the same, and the inverse gives its weights back to the bit.
    """
    orders: dict[tuple[str, str], UnitOrder] = {}
    for kind in ("neurons", "groups"):
        read = units_read(attached.model, kind)
        for name, layer in _layers(attached).items():
            if name in read:
                units, own = read[name].units, layer.indices.cpu()
                chosen = torch.isin(read[name].channels, own).all(1).nonzero().flatten()
                order = UnitOrder(units, tuple(in_front(units.count, chosen.tolist())))
                orders.setdefault((units.name, kind), order)
    return Permutation(tuple(orders.values()))


@contextmanager
def units_in_front(attached: Attachment) -> Iterator[None]:
    """The model's units are in the order of `to_front`, in here, and the adapter's columns slices.

    Slices are written many times faster than columns that lie apart, which counts where an update
    has few tokens, and where an adapter is merged and unmerged often. The adapter keeps its own
    indices, so a file of it is for the model as it was; the model itself is saved in here as it is.

    Raises:
        InputError: another adapter is on the model; columns of a layer do not become a slice; or
            weights are sharded over ranks.
    """
    if others := worn(attached.model) - {attached.name}:
        problem = "is on the model too, for the order that its weights have now; detach it first"
        raise InputError(problem, value=min(others))
    order, layers = to_front(attached), _layers(attached)
    first = {name: _first(order, layer) for name, layer in layers.items()}
    order.apply(attached.model)
    try:
        for name, layer in layers.items():
            layer.first = first[name]
        yield
    finally:
        for layer in layers.values():
            layer.first = None
        order.inverse().apply(attached.model)


def _layers(attached: Attachment) -> dict[str, ColumnsLayer]:
    return {name: layer for name, layer in attached.layers() if isinstance(layer, ColumnsLayer)}


def _first(order: Permutation, layer: ColumnsLayer) -> int:
    """Where the slice begins that a layer's columns become."""
    site, indices = layer.site, layer.indices.long().cpu()
    came = order.places(f"{site.name}.weight", int(not site.transposed), site.in_features)
    now = came.argsort()[indices]
    first = int(now[0])
    if not torch.equal(now, torch.arange(first, first + len(now))):
        raise InputError("its columns do not become one slice in any order", value=site.name)
    return first
