"""Labels that say of which layer's output channel each element of a tensor comes.

A label is an integer: every origin has a range of its own. Labels have the shape of their tensor,
mostly as expanded views that take no memory. Knows nothing of operators or modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

NOTHING = -1


@dataclass(frozen=True)
class Labels:
    """One label for each element, and the operators that changed the values since the origin."""

    labels: Tensor
    operators: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Trail:
    """Where a tensor comes from: labels, in several layers where elements mix several origins.

    Args:
        scores: of products of queries and keys, the labels [heads, width] of both.
        lost: why nothing is known.
    """

    layers: tuple[Labels, ...] = ()
    scores: tuple[tuple[Labels, ...], tuple[Labels, ...]] | None = None
    lost: str = ""


@dataclass
class Origin:
    """What gives channels labels of their own: a linear layer, a norm, a sum of the stream."""

    kind: str
    name: str
    size: int
    first: int
    number: int
    operators: set[str] = field(default_factory=set)  # that used its output, but for products
    lost: str = ""  # an operator after which its channels could not be followed


class Origins:
    """All origins, and which of them have the same channels because sums or norms tie them."""

    def __init__(self) -> None:
        self.all: list[Origin] = []
        self._starts: list[int] = []
        self._above: list[int] = []
        self._next = 0

    def new(self, kind: str, name: str, size: int) -> Origin:
        """An origin with labels of its own."""
        origin = Origin(kind, name, size, self._next, len(self.all))
        self._next += size
        self.all.append(origin)
        self._starts.append(origin.first)
        self._above.append(origin.number)
        return origin

    def of(self, label: int) -> Origin:
        """The origin that a label belongs to."""
        place = torch.searchsorted(torch.tensor(self._starts), label, right=True)
        return self.all[int(place) - 1]

    def root(self, origin: Origin) -> int:
        """The number of the class of origins with the same channels."""
        number = origin.number
        while self._above[number] != number:
            number = self._above[number]
        return number

    def tie(self, first: Origin, second: Origin) -> None:
        """Note that channel i of both is the same."""
        self._above[self.root(first)] = self.root(second)

    def tied_to(self, origin: Origin) -> list[Origin]:
        """All that have its channels, in the order in which they ran."""
        root = self.root(origin)
        return [other for other in self.all if self.root(other) == root]

    def sole(self, labels: Tensor) -> Origin | None:
        """The one origin of all these labels; None where there is none, or more."""
        if not labels.numel() or (smallest := int(labels.min())) < 0:
            return None
        origin = self.of(smallest)
        return origin if int(labels.max()) < origin.first + origin.size else None

    def aligned(self, trail: Trail | None, ndim: int) -> tuple[Origin, int] | None:
        """The origin whose channels lie in order along one dimension of the tensor, and which."""
        if trail is None or len(trail.layers) != 1 or ndim < 1:
            return None
        labels = trail.layers[0].labels
        if not labels.numel():
            return None
        for dim in {ndim - 1: 0, min(1, ndim - 1): 0}:
            row = along(labels, dim)
            if row is None or int(row[0]) < 0:
                continue
            origin = self.of(int(row[0]))
            if len(row) == origin.size and torch.equal(row, own_labels(origin)):
                return origin, dim
        return None


def own_labels(origin: Origin) -> Tensor:
    """int64 [size]."""
    return torch.arange(origin.first, origin.first + origin.size)


def laid(origin: Origin, shape: torch.Size, dim: int) -> Tensor:
    """The labels of an origin along a dimension of a tensor of this shape."""
    around = [1] * len(shape)
    around[dim] = origin.size
    return own_labels(origin).reshape(around).expand(shape)


def along(labels: Tensor, dim: int) -> Tensor | None:
    """The labels along one dimension; None where other dimensions differ."""
    moved = labels.movedim(dim, -1)
    row = moved[(0,) * (moved.ndim - 1)]
    for other in range(moved.ndim - 1):
        if moved.stride(other) == 0:  # a view that repeats has no need to be compared
            moved = moved.narrow(other, 0, min(1, moved.shape[other]))
    return row.contiguous() if bool((moved == row).all()) else None


def layers_along(trail: Trail | None, dim: int) -> tuple[Labels, ...] | None:
    """All layers of a trail along one dimension; None where they are not known."""
    if trail is None or not trail.layers:
        return None
    rows = [(along(layer.labels, dim), layer.operators) for layer in trail.layers]
    found = tuple(Labels(row, operators) for row, operators in rows if row is not None)
    return found if len(found) == len(rows) else None


def by_head(trail: Trail | None, heads: int, width: int, token_dim: int) -> tuple[Labels, ...]:
    """The labels [heads, width] of queries, keys or values; empty where they are not known."""
    if trail is None:
        return ()
    found = []
    for layer in trail.layers:
        labels = layer.labels
        first = labels.narrow(token_dim, 0, 1)
        if labels.ndim == 4:
            first = first[:1]
        if not bool((labels == first).all()):
            return ()
        found.append(Labels(first.reshape(-1, heads, width)[0].contiguous(), layer.operators))
    return tuple(found)


def mixed(trails: list[Trail], shape: torch.Size, operator: str) -> Trail:
    """The trail of an elementwise function of tensors with these trails."""
    scores = next((trail.scores for trail in trails if trail.scores is not None), None)
    layers: list[Labels] = []
    for trail in trails:
        for layer in trail.layers:
            labels = torch.broadcast_to(layer.labels, shape)
            same = next((i for i, o in enumerate(layers) if torch.equal(o.labels, labels)), None)
            operators = layer.operators | {operator}
            if same is None:
                layers.append(Labels(labels, operators))
            else:
                layers[same] = Labels(labels, layers[same].operators | operators)
    if len(layers) > 3:
        return Trail(lost=f"{operator} mixes more than three layers' outputs")
    lost = next((trail.lost for trail in trails if trail.lost), "")
    return Trail(tuple(layers), scores, "" if layers or scores else lost)
