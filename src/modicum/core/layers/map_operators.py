"""What operators that move, join and mix elements do to labels.

Knows nothing of products with weights, nor of modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.layers.map_calls import Trace, tensors
from modicum.core.layers.map_labels import (
    NOTHING,
    Labels,
    Origin,
    Trail,
    along,
    laid,
    mixed,
)

KEEPS = {"clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh", "_softmax"}
KEEPS |= {"native_dropout", "_safe_softmax", "dropout"}
VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
MOVES = {"transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "slice", "select", "split"}
MOVES |= {"split_with_sizes", "unbind", "roll", "repeat", "flip", "index_select", "index"}
MOVES |= {"constant_pad_nd", "numpy_T", "unsafe_split", "narrow", "chunk", "movedim"}
REDUCES = {"mean", "sum", "amax", "amin"}
POOLS = {"max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool2d"}
POOLS |= {"upsample_nearest2d", "upsample_bilinear2d", "max_pool1d", "avg_pool1d", "max_pool2d"}


@dataclass
class WeightView:
    """A parameter or a view of one: for each dimension of the parameter the places there."""

    name: str
    places: tuple[Tensor, ...]


class LabelledTensors:
    """The labels of all tensors of a pass, and what operators without weights do to them."""

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        self.model, self.found = model, Trace()
        self.origins = self.found.origins
        self._trails: dict[int, tuple[Tensor, Trail]] = {}
        self._weights: dict[int, tuple[Tensor, WeightView]] = {}
        self._tables: dict[str, Trail] = {}
        self._shapes = {names[id(p)]: p.shape for p in model.parameters()}
        for parameter in model.parameters():
            shape = parameter.shape
            places = tuple(
                torch.arange(n).reshape([-1 if d == i else 1 for d in range(len(shape))])
                .expand(shape) for i, n in enumerate(shape)
            )  # fmt: skip
            name = names[id(parameter)]
            self._weights[id(parameter)] = parameter, WeightView(name, places)
        self._inside: list[str] = []  # modules whose operators are not looked at
        self._path: list[str] = []

    def trail(self, tensor: Any) -> Trail | None:
        """What is known of a tensor; of a parameter, that its last dimension are channels."""
        if id(tensor) in self._trails:
            return self._trails[id(tensor)][1]
        if id(tensor) not in self._weights:
            return None
        _, weight = self._weights[id(tensor)]
        if weight.name not in self._tables:
            size = self._shapes[weight.name][-1] if self._shapes[weight.name] else 1
            origin = self.origins.new("table", weight.name, size)
            self._tables[weight.name] = Trail((Labels(torch.tensor(origin.first)),))
        first = int(self._tables[weight.name].layers[0].labels)
        if not weight.places:
            return None
        return Trail((Labels(weight.places[-1] + first),))

    def _set(self, tensor: Tensor, trail: Trail) -> None:
        self._trails[id(tensor)] = tensor, trail

    def _use(self, trails: list[Trail], operator: str) -> None:
        """Note for each origin which operator is the first to change or mix what it gave."""
        for trail in trails:
            for layer in trail.layers:
                if not layer.operators and (origin := self.origins.sole(layer.labels)) is not None:
                    origin.operators.add(operator)

    def _lose(self, trails: list[Trail], what: str, out: Any) -> None:
        where = f" in {self._path[-1]}" if self._path and self._path[-1] else ""
        why = f"{what}{where} cannot be followed"
        self._use(trails, what)
        for trail in trails:
            why = trail.lost or why
            for layer in trail.layers:
                for value in layer.labels.unique()[:8]:
                    if value >= 0:
                        self.origins.of(int(value)).lost = why
        for tensor in tensors(out):
            if tensor.is_floating_point():
                self._set(tensor, Trail(lost=why))

    def _view_of_weight(self, operator: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Views of parameters keep the places; anything else of a parameter is forgotten."""
        places = self._weights[id(args[0])][1].places
        moved = [_do(operator, name, place, args, kwargs, out) for place in places]
        for number, tensor in enumerate(tensors(out)):
            parts = [m if isinstance(m, Tensor) else m[number] for m in moved if m is not None]
            if len(parts) == len(places):
                found = WeightView(self._weights[id(args[0])][1].name, tuple(parts))
                self._weights[id(tensor)] = tensor, found

    def _kept(self, name: str, args: Any, out: Any) -> None:
        if name == "copy":
            self._set(out, self.trail(args[1]) or Trail(lost="a copy of unknown values"))
        elif (trail := self.trail(args[0])) is not None:
            self._set(next(tensors(out)), trail)

    def _moved(self, operator: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        trail = self.trail(args[0])
        if trail is None:
            return
        moved = [_do(operator, name, x.labels, args, kwargs, out) for x in trail.layers]
        if any(m is None for m in moved):
            self._lose([trail], f"the operator {name}", out)
            return
        if name in REDUCES | POOLS:
            self._use([trail], name)
        for number, tensor in enumerate(tensors(out)):
            layers = []
            for part, layer in zip(moved, trail.layers, strict=True):
                labels = part if isinstance(part, Tensor) else part[number]
                layers.append(Labels(labels, layer.operators))
            self._set(tensor, Trail(tuple(layers), trail.scores, trail.lost))
            if name in POOLS:
                break

    def _paired(self, name: str, given: Tensor, out: Tensor) -> None:
        """Pairs as complex numbers: a product with another mixes the two."""
        trail = self.trail(given)
        if trail is None:
            return
        layers = trail.layers
        if name == "view_as_complex" and len(layers) == 1:
            both = tuple(Labels(layers[0].labels[..., i], layers[0].operators) for i in (0, 1))
            self._set(out, Trail(both))
        elif name == "view_as_real" and len(layers) == 2:
            one, other = (layer.labels for layer in layers)
            operators = layers[0].operators
            both = (Labels(torch.stack((one, other), -1), operators),
                    Labels(torch.stack((other, one), -1), operators))  # fmt: skip
            self._set(out, Trail(both))
        else:
            self._lose([trail], f"the operator {name}", out)

    def _joined(self, operator: Any, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        parts = list(args[0])
        trails = [self.trail(part) or Trail() for part in parts]
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
        found = [self.origins.aligned(t, p.ndim) for t, p in zip(trails, parts, strict=True)]
        sizes = {(a[0].size, a[1]) for a in found if a is not None}
        if name == "cat" and len(sizes) == 1 and None not in found and sizes != {(0, dim)}:
            ((_, channels),) = sizes
            if channels != dim:
                self._summed([a[0] for a in found if a], trails, "cat", channels, out)
                return
        layers = []
        for place in range(max((len(trail.layers) for trail in trails), default=0)):
            labels = [
                t.layers[place].labels if place < len(t.layers) else torch.full(p.shape, NOTHING)
                for t, p in zip(trails, parts, strict=True)
            ]
            every = [t.layers[place].operators for t in trails if place < len(t.layers)]
            layers.append(Labels(operator(labels, *args[1:], **kwargs), frozenset().union(*every)))
        lost = next((t.lost for t in trails if t.lost), "")
        scores = next((t.scores for t in trails if t.scores), None)
        self._set(out, Trail(tuple(layers), scores, "" if layers or scores else lost))

    def _summed(
        self, origins: list[Origin], trails: list[Trail], how: str, dim: int, out: Tensor
    ) -> None:
        where = self._path[-1] if self._path else ""
        origin = self.origins.new("sum", where, origins[0].size)
        self._use(trails, how)
        for other in origins:
            self.origins.tie(other, origin)
        self._set(out, Trail((Labels(laid(origin, out.shape, dim)),)))

    def _pointwise(self, name: str, given: list[Tensor], out: Any) -> None:
        if not isinstance(out, Tensor):
            return
        known = [(t, trail) for t in given if (trail := self.trail(t)) is not None]
        trails = [trail for _, trail in known if trail.layers or trail.scores or trail.lost]
        aligned = [self.origins.aligned(trail, t.ndim) for t, trail in known]
        if len(aligned) == 2 and all(aligned):
            (one, dim), (other, other_dim) = (a for a in aligned if a)
            from_end = out.ndim - known[0][0].ndim, out.ndim - known[1][0].ndim
            same = dim + from_end[0] == other_dim + from_end[1] and one.size == other.size
            kinds = (one.kind, other.kind)
            if same and one is not other and name in ("add", "sub"):
                for a, b in ((one, other), (other, one)):
                    if b.kind == "table" and a.kind == "linear" and self._bias(a, b, trails):
                        labels = laid(a, out.shape, dim + from_end[0])
                        self._set(out, Trail((Labels(labels),)))
                        return
                self._summed([one, other], trails, name, dim + from_end[0], out)
                return
            if same and one is not other and "table" in kinds:
                self.origins.tie(one, other)
                place = 1 if kinds[0] == "table" else 0
                trails = [trails[place]]
        self._use(trails, name)
        try:
            self._set(out, mixed(trails, out.shape, name))
        except RuntimeError:
            self._lose(trails, f"the operator {name}", out)

    def _bias(self, made: Origin, table: Origin, trails: list[Trail]) -> bool:
        """Whether a table of one row that is added is the bias of a product."""
        shape = self._shapes[table.name]
        product = next(p for p in self.found.products if p.origin is made)
        if len(shape) != 1 or product.bias or any(t.layers[0].operators for t in trails):
            return False
        product.bias, table.kind = table.name, "bias"
        return True


def _do(operator: Any, name: str, labels: Tensor, args: Any, kwargs: Any, out: Any) -> Any:
    """What a movement does, done to labels; None where it mixes labels or cannot be done."""
    shape = next(tensors(out)).shape
    if name in KEEPS:
        return labels
    if name in VIEWS:
        return labels.reshape(shape)
    if name in POOLS:
        if labels.ndim != len(shape) or (row := along(labels, 1)) is None:
            return None
        return row.reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape)
    try:
        if name not in REDUCES:
            return operator(labels, *args[1:], **kwargs)
        dims = args[1] if len(args) > 1 else list(range(labels.ndim))
        keep = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim"))
        low, high = labels.amin(dims, keep), labels.amax(dims, keep)
        return low if torch.equal(low, high) else None
    except (RuntimeError, NotImplementedError, TypeError):
        return None
