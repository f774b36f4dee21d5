"""Orders of units as a value: given to a model or to single tensors, and taken back to the bit.

Methods that train or keep a part of the units bring these to the front, where they are one slice of
each tensor, and give files in the order that the model had. Knows units, and no method.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.map_edits import check_order, exchange
from modicum.core.layers.map_parts import Units


@dataclass(frozen=True)
class UnitOrder:
    """Units, and which of them comes to each place."""

    units: Units
    order: tuple[int, ...]

    def inverse(self) -> UnitOrder:
        """The order that undoes this one."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return UnitOrder(self.units, tuple(back))


@dataclass(frozen=True)
class Permutation:
    """Orders of units of several kinds, given one after the other. The model computes the same.

    All that goes with a unit moves with it: the rows of gate and up, their biases and the columns
    of down; the rows of queries, keys and values, their biases and the columns of the output.

    >>> from modicum.core.layers.map import find_map
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    >>> neurons = find_map(model).mlps[0].neurons
    >>> moved = Permutation((UnitOrder(neurons, tuple(in_front(3, [2]))),))
    >>> moved.apply(model)
    >>> torch.equal(model[0].weight, before["0.weight"][[2, 0, 1]])
    True
    >>> moved.inverse().apply(model)
    >>> all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    True
    """

    orders: tuple[UnitOrder, ...]

    def apply(self, model: nn.Module) -> None:
        """Give a model these orders, in place; nothing is changed where one is refused.

        Raises:
            InputError: an order is none of the units, theirs matters, or weights are sharded.
        """
        for each in self.orders:
            check_order(model, each.units, each.order)
        for each in self.orders:
            exchange(model, each.units, torch.tensor(each.order))

    def inverse(self) -> Permutation:
        """What undoes this one, to the bit."""
        return Permutation(tuple(each.inverse() for each in reversed(self.orders)))

    def permuted(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of this name in these orders: of a file, a gradient, or a moment.

        Args:
            tensor: as large as the model's of that name.
        """
        for dim in range(tensor.ndim):
            places = self.places(name, dim, tensor.shape[dim]).to(tensor.device)
            tensor = tensor.index_select(dim, places)
        return tensor

    def places(self, name: str, dim: int, size: int) -> Tensor:
        """Which place along a dimension comes to each of its `size` places: int64 [size]."""
        found = torch.arange(size)
        for each in self.orders:
            order, moved = torch.tensor(each.order), torch.arange(size)
            for piece in dict.fromkeys(each.units.slices):
                if (piece.tensor, piece.dim) == (name, dim):
                    rows = piece.places().reshape(each.units.count, -1)
                    moved[rows.flatten()] = rows[order].flatten()
            found = found[moved]
        return found


def in_front(count: int, first: Sequence[int], second: Collection[int] = ()) -> list[int]:
    """An order of `count` units that has two sets of them as slices at its front.

    It is: those of `first` alone, those of both, those of `second` alone, all others. So `first` is
    the slice `[: len(first)]`, and `second` begins where those of `first` alone end.

    Raises:
        InputError: a unit is none of these, or named twice in a set.

    >>> in_front(6, [5, 2], [3, 5])
    [2, 5, 3, 0, 1, 4]
    """
    for chosen in (first, second):
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(count)):
            problem = f"must name different units, of {count}"
            raise InputError(problem, field="order", value=list(chosen))
    one, other = set(first), set(second)
    parts = (one - other, one & other, other - one, set(range(count)) - one - other)
    return [place for part in parts for place in sorted(part)]
