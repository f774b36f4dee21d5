"""Which entries of a weight [out, in] a patch has: read, written, and their gradient.

A weight is given as its layer stores it: transposed or not, all of it or a rank's rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from modicum.adapters.sites import Site
from modicum.core.errors import InputError


class Spot(NamedTuple):
    """Where entries lie in a layer's weight, or in a rank's rows of it: `stored[at]` are these.

    `chosen` are their places in the flattened values of a patch; None: all, in their shape.
    """

    stored: Tensor
    at: tuple[Tensor, ...]
    chosen: Tensor | None

    def read(self) -> Tensor:
        """Copies of the entries."""
        return self.stored[self.at]

    def write(self, values: Tensor) -> None:
        """Set the entries to values that were read, or picked; they are rounded."""
        self.stored[self.at] = values.to(self.stored.dtype)

    def pick(self, values: Tensor) -> Tensor:
        """Of a patch's values, those that lie here."""
        return values if self.chosen is None else values.flatten()[self.chosen]


class ColumnSpot(Spot):
    """Full columns [out, c] of a full weight [out, in]: several times faster than their entries."""

    def read(self) -> Tensor:
        return self.stored.index_select(1, self.at[0])

    def write(self, values: Tensor) -> None:
        self.stored.index_copy_(1, self.at[0], values.to(self.stored.dtype))


class SliceSpot(Spot):
    """Neighbouring columns [out, c] of a full weight: `stored` is a view of them alone."""

    def read(self) -> Tensor:
        return self.stored.clone()

    def write(self, values: Tensor) -> None:
        self.stored.copy_(values)


@dataclass(frozen=True)
class Places(ABC):
    """Entries of a layer's weight, each once, in an order of their own.

    Args:
        indices: int32, ascending; what they count, subclasses say.
        site: the layer.
    """

    indices: Tensor
    site: Site

    @abstractmethod
    def rows_and_columns(self) -> tuple[Tensor, Tensor]:
        """Which entries of [out, in] these are: two tensors that index it, in the values' shape."""

    @abstractmethod
    def at(self, values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """What values of these entries are at others, and zero where these have none."""

    @abstractmethod
    def kept(self, inputs: Tensor) -> Tensor:
        """What of a layer's inputs [..., in] the gradient of the entries needs."""

    @abstractmethod
    def gradient(self, outgoing: Tensor, kept: Tensor) -> Tensor:
        """The loss's gradient at the entries.

        Args:
            outgoing: its gradient at the layer's output, [n, out].
            kept: what `kept` gave, as [n, ...].
        """

    def spot(self, stored: Tensor, before: int = 0) -> Spot:
        """Where these entries are in a layer's weight, or in a rank's rows of it.

        Args:
            stored: the weight as the layer stores it, or some of its rows.
            before: how many rows of the full one precede it.
        """
        rows, columns = self.rows_and_columns()
        first, second = (columns, rows) if self.site.transposed else (rows, columns)
        full = self.site.in_features if self.site.transposed else self.site.out_features
        if stored.shape[0] == full:
            return Spot(stored, (first, second), None)
        first, second = torch.broadcast_tensors(first, second)
        first, second = first.flatten() - before, second.flatten()
        chosen = ((first >= 0) & (first < stored.shape[0])).nonzero().flatten()
        return Spot(stored, (first[chosen], second[chosen]), chosen)


class Entries(Places):
    """Single entries: an index is row x in + column. Values are [k].

    >>> from modicum.adapters.sites import Site
    >>> places = Entries(torch.tensor([1, 5], dtype=torch.int32), Site("a", "linear", 3, 2))
    >>> weight = torch.zeros(2, 3)
    >>> places.spot(weight).write(torch.tensor([7.0, 8.0]))
    >>> weight.tolist()
    [[0.0, 7.0, 0.0], [0.0, 0.0, 8.0]]
    """

    def rows_and_columns(self) -> tuple[Tensor, Tensor]:
        width = self.site.in_features
        flat = self.indices.long()
        rows = flat.div(width, rounding_mode="floor")
        return rows, flat - rows * width

    def spot(self, stored: Tensor, before: int = 0) -> Spot:
        full = stored.shape == (self.site.out_features, self.site.in_features)
        if full and not self.site.transposed and stored.is_contiguous():
            # Sorted places of one dimension: several times faster than pairs of them.
            return Spot(stored.view(-1), (self.indices.long(),), None)
        return super().spot(stored, before)

    def at(self, values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        flat = (rows * self.site.in_features + columns).int()
        return _looked_up(self.indices, flat, lambda found: values[found])

    def kept(self, inputs: Tensor) -> Tensor:
        return inputs

    def gradient(self, outgoing: Tensor, kept: Tensor) -> Tensor:
        return (outgoing.T @ kept).flatten()[self.indices.long()]


@dataclass(frozen=True)
class Columns(Places):
    """Full columns: an index is an input's. Values are [out, c].

    Of an input its c columns alone are kept, copied, as a view would keep all of it.

    Args:
        first: the first index, where they are known to be a slice, which is read and written many
            times faster than as many columns that lie apart.

    >>> from modicum.adapters.sites import Site
    >>> places = Columns(torch.tensor([1], dtype=torch.int32), Site("a", "linear", 3, 2))
    >>> places.gradient(torch.ones(4, 2), places.kept(torch.ones(4, 3))).tolist()
    [[4.0], [4.0]]
    """

    first: int | None = None

    def rows_and_columns(self) -> tuple[Tensor, Tensor]:
        rows = torch.arange(self.site.out_features, device=self.indices.device)
        return rows[:, None], self.indices.long()[None, :]

    def spot(self, stored: Tensor, before: int = 0) -> Spot:
        full = self.site.in_features if self.site.transposed else self.site.out_features
        if stored.shape[0] != full:
            return super().spot(stored, before)
        oriented = stored.T if self.site.transposed else stored
        if self.first is not None:
            return SliceSpot(oriented.narrow(1, self.first, len(self.indices)), (), None)
        return ColumnSpot(oriented, (self.indices.long(),), None)

    def at(self, values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        rows, columns = torch.broadcast_tensors(rows, columns)
        return _looked_up(self.indices, columns.int(), lambda found: values[rows, found])

    def kept(self, inputs: Tensor) -> Tensor:
        return inputs.index_select(-1, self.indices.long())

    def gradient(self, outgoing: Tensor, kept: Tensor) -> Tensor:
        return outgoing.T @ kept


def _looked_up(known: Tensor, asked: Tensor, values: Callable[[Tensor], Tensor]) -> Tensor:
    """The values at places among ascending ones, and zero at places that are not there."""
    found = torch.searchsorted(known, asked.contiguous()).clamp_(max=len(known) - 1)
    given = values(found)
    return torch.where(known[found] == asked, given, torch.zeros_like(given))


def check_indices(indices: Tensor, limit: int, *, field: str, name: str) -> None:
    """Make sure that indices, as of a file, are ascending and below a limit, each once.

    Raises:
        InputError: they are not.
    """
    numbers = indices.long()
    if numbers.numel() and (int(numbers.min()) < 0 or int(numbers.max()) >= limit):
        problem = f"has an index outside of the weight, which has places 0 to {limit - 1}"
        raise InputError(problem, field=field, value=name)
    if (numbers.diff() <= 0).any():
        problem = "must be ascending, with no index twice"
        raise InputError(problem, field=field, value=name)
