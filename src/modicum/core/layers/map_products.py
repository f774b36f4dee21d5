"""What products, attentions and convolutions do to labels, and which operator is which.

Knows nothing of modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modicum.core.layers.map_calls import AttentionCall, Product, tensors
from modicum.core.layers.map_labels import Labels, Trail, along, by_head, laid, layers_along
from modicum.core.layers.map_operators import (
    KEEPS,
    MOVES,
    POOLS,
    REDUCES,
    VIEWS,
    LabelledTensors,
    WeightView,
)

_PRODUCTS = {"mm", "addmm", "linear", "bmm", "baddbmm", "matmul"}


class LabelledProducts(LabelledTensors):
    """Takes each operator, runs it, and does with the labels what it did with the values."""

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and follow the channels through it."""
        out = operator(*args, **kwargs)
        if not self._inside:
            given = list(tensors((args, kwargs)))
            if any(id(t) in self._trails or id(t) in self._weights for t in given):
                self._follow(operator, args, kwargs, out, given)
        return out

    def _follow(self, operator: Any, args: Any, kwargs: Any, out: Any, given: list[Tensor]) -> None:
        name = str(operator.overloadpacket).removeprefix("aten.")
        name = name[:-1] if name.endswith("_") and not name.startswith("__") else name
        first = args[0] if args else None
        one = isinstance(first, Tensor)
        if one and id(first) in self._weights and name in MOVES | KEEPS:
            self._view_of_weight(operator, name, args, kwargs, out)
        elif one and name in MOVES | VIEWS | REDUCES | POOLS:
            self._moved(operator, name, args, kwargs, out)
        elif one and name in KEEPS | {"copy"}:
            self._kept(name, args, out)
        elif name in ("cat", "stack"):
            self._joined(operator, name, args, kwargs, out)
        elif name in _PRODUCTS:
            self._product(name, args, out)
        elif name == "convolution":
            self._convolved(args, out)
        elif name.startswith(("_scaled_dot_product", "scaled_dot_product")):
            query, key, value = (self._heads(t, t.shape[1]) for t in args[:3])
            self._attended(query, key, value, next(tensors(out)))
        elif torch.Tag.pointwise in operator.tags or name == "gelu":
            self._pointwise(name, given, out)
        else:
            self._special(name, first, given, out)

    def _special(self, name: str, first: Any, given: list[Tensor], out: Any) -> None:
        if name == "embedding" and id(first) in self._weights:
            origin = self.origins.new("embedding", self._weights[id(first)][1].name, out.shape[-1])
            self._set(out, Trail((Labels(laid(origin, out.shape, out.ndim - 1)),)))
        elif name in ("view_as_complex", "view_as_real"):
            self._paired(name, first, out)
        else:
            trails = [t for t in (self.trail(tensor) for tensor in given) if t is not None]
            self._lose(trails, f"the operator {name}", out)

    def _product(self, name: str, args: Any, out: Tensor) -> None:
        added = name in ("addmm", "baddbmm")
        left, right = args[1:3] if added else args[:2]
        bias = args[0] if added else args[2] if len(args) > 2 else None
        if id(right) in self._weights and id(left) not in self._weights:
            self._weighed(name, left, right, bias, out)
            return
        one, other = self.trail(left), self.trail(right)
        if one is not None and one.scores is not None and other is not None and out.ndim == 3:
            value = by_head(other, right.shape[0], right.shape[2], 1)
            self._attended(*one.scores, value, out)
        elif (
            one is not None and other is not None and one.layers and other.layers and out.ndim == 3
        ):
            keys = Trail(tuple(Labels(x.labels.transpose(1, 2)) for x in other.layers))
            scores = (
                by_head(one, left.shape[0], left.shape[2], 1),
                by_head(keys, right.shape[0], right.shape[1], 1),
            )
            self._use([one, other], name)
            self._set(out, Trail(scores=scores))
        else:
            self._lose([t for t in (one, other) if t is not None], f"the operator {name}", out)

    def _weighed(self, name: str, left: Any, right: Any, bias: Any, out: Tensor) -> None:
        """A product with a parameter, or a view of one."""
        weight = self._weights[id(right)][1]
        sides = (1, 0) if name == "linear" else (0, 1)
        axes = _axes(weight) if right.ndim == 2 else None
        trail, added = self.trail(left), self.trail(bias)
        if axes is None:
            self._lose([trail] if trail else [], f"a product with a view of {weight.name}", out)
            return
        (in_dim, in_places), (out_dim, out_places) = (axes[side] for side in sides)
        origin = self.origins.new("linear", weight.name, out.shape[-1])
        given = layers_along(trail, left.ndim - 1)
        if trail is not None and not plain(given):
            self._use([trail], "a product")
        lost = trail.lost if trail is not None else "its input was not followed"
        found = Product(origin, weight.name, out_dim, out_places, in_dim, in_places, given, lost)
        self.found.products.append(found)
        self._set(out, Trail((Labels(laid(origin, out.shape, out.ndim - 1)),)))
        if id(bias) in self._weights:
            found.bias = self._weights[id(bias)][1].name
        elif added is not None:
            # What is added is another layer's output, not a bias.
            base = self.origins.aligned(added, bias.ndim)
            if base is None or base[0].size != origin.size:
                self._lose([added], f"what {weight.name} is added to", out)
            else:
                self._summed([base[0], origin], [added], name, out.ndim - 1, out)

    def _heads(self, tensor: Tensor, heads: int) -> tuple[Labels, ...]:
        return by_head(self.trail(tensor), heads, tensor.shape[-1], 2) if tensor.ndim == 4 else ()

    def _attended(
        self,
        query: tuple[Labels, ...],
        key: tuple[Labels, ...],
        value: tuple[Labels, ...],
        out: Tensor,
    ) -> None:
        heads, width = out.shape[-3], out.shape[-1]
        name = self._path[-1] if self._path else ""
        origin = self.origins.new("attention", name, heads * width)
        self.found.attentions.append(AttentionCall(origin, query, key, value))
        labels = torch.arange(origin.first, origin.first + origin.size).reshape(heads, 1, width)
        self._set(out, Trail((Labels(labels.expand(out.shape)),)))

    def _convolved(self, args: Any, out: Tensor) -> None:
        given, kernel, bias, groups, transposed = args[0], args[1], args[2], args[8], args[6]
        trail = self.trail(given)
        if id(kernel) not in self._weights or transposed:
            self._lose([trail] if trail else [], "this convolution", out)
            return
        name, channels = self._weights[id(kernel)][1].name, kernel.shape[0]
        origin = self.origins.new("linear", name, channels)
        lost = trail.lost if trail is not None else "its input was not followed"
        found = Product(origin, name, 0, torch.arange(channels), 1, torch.arange(kernel.shape[1]),
                        layers_along(trail, 1), lost, groups=groups, convolution=True)  # fmt: skip
        if id(bias) in self._weights:
            found.bias = self._weights[id(bias)][1].name
        before = self.origins.aligned(trail, given.ndim)
        if groups > 1 and before is not None:
            if groups == channels == before[0].size and before[1] == 1:
                self.origins.tie(before[0], origin)
            else:
                before[0].lost = origin.lost = f"{name} is a convolution in groups"
        self.found.products.append(found)
        self._set(out, Trail((Labels(laid(origin, out.shape, 1)),)))


def _axes(weight: WeightView) -> list[tuple[int, Tensor]] | None:
    """Along which dimension of its parameter each axis of a matrix runs, through which places."""
    found: list[dict[int, Tensor]] = [{}, {}]
    for axis, rows in enumerate(found):
        for dim, places in enumerate(weight.places):
            row = along(places, axis)
            if row is not None and not bool((row == row[0]).all()):
                rows[dim] = row
    for one, other in (found, found[::-1]):
        if not one and len(other) == 1 and len(weight.places) == 2:
            # An axis of one place runs along the dimension that the other axis leaves.
            (dim,) = {0, 1} - set(other)
            one[dim] = weight.places[dim].flatten()[:1]
    if any(len(rows) != 1 for rows in found):
        return None
    return [next(iter(rows.items())) for rows in found]


def plain(given: tuple[Labels, ...] | None) -> bool:
    """Whether an input is what one layer gave, as it is."""
    return given is not None and len(given) == 1 and not given[0].operators
