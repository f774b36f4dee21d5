"""Which units of a model are kept where others are removed, as a value that can be taken back.

It makes a model or a single tensor small, and gives it the full shape again, with zeros where units
were removed: what a small model learned has a place in the full one. Knows units, and no method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.map_edits import check_removal, put_in, recount, remove, tensor_of
from modicum.core.layers.map_parts import MappedSlice, ModelMap, Units

_WIDEST = 1 << 24  # places of a slice: more are a damaged file's
_MAKERS, _READERS = "makers", "readers"


@dataclass(frozen=True)
class KeptUnits:
    """Units as the full model has them, and those of them that are kept, in order."""

    units: Units
    kept: tuple[int, ...]

    @property
    def removed(self) -> tuple[int, ...]:
        """Those that are not kept, in order."""
        kept = set(self.kept)
        return tuple(place for place in range(self.units.count) if place not in kept)


@dataclass(frozen=True)
class Reduction:
    """Which units are kept, of every part of a model that loses some.

    >>> from modicum.core.layers.map import find_map
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> small = Reduction((KeptUnits(find_map(model).mlps[0].neurons, (0, 2)),))
    >>> small.apply(model)
    >>> model[0].weight.shape, small.restored("2.weight", model[2].weight).shape
    (torch.Size([2, 2]), torch.Size([2, 3]))
    """

    parts: tuple[KeptUnits, ...]

    def apply(self, model: nn.Module) -> None:
        """Remove all others from the full model; nothing is changed where that is refused.

        Raises:
            InputError: as `remove`; or two parts remove places of one tensor along one dimension.
        """
        self._check_apart()
        for part in self.parts:
            if part.removed:
                check_removal(model, part.units, part.removed)
        for part in self.parts:
            if part.removed:
                remove(model, part.units, part.removed)

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Give a small model the full shapes, with zeros for what was removed, in place.

        It computes what the small one did. Make optimizers afterwards: parameters are new.
        """
        for part in self.parts:
            if part.removed:
                for name in dict.fromkeys(piece.tensor for piece in part.units.slices):
                    old = tensor_of(model, name)
                    put_in(model, old, Reduction((part,)).restored(name, old.detach()))
                recount(model, part.units, len(part.removed), back=True)

    def reduced(self, name: str, tensor: Tensor) -> Tensor:
        """What is kept of the full model's tensor of this name."""
        for dim in range(tensor.ndim):
            if (kept := self.places(name, dim, tensor.shape[dim])) is not None:
                tensor = tensor.index_select(dim, kept.to(tensor.device))
        return tensor

    def restored(self, name: str, tensor: Tensor) -> Tensor:
        """The small model's tensor of this name in the full shape, zero where it was removed."""
        for dim in range(tensor.ndim):
            tensor = self._widened(name, dim, tensor, dim)
        return tensor

    def restored_factors(
        self, layer: str, a: Tensor, b: Tensor, *, transposed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Factors of a change of the small layer's weight, as factors of the full one's.

        The change b a becomes that of the places that are kept, and zero elsewhere.

        Args:
            layer: its full name.
            a, b: [r, in] and [out, r] of the small layer.
            transposed: whether the layer stores W^T.

        >>> from modicum.core.layers.map import find_map
        >>> neurons = find_map(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))).mlps[0]
        >>> kept = Reduction((KeptUnits(neurons.neurons, (0, 2)),))
        >>> a, b = kept.restored_factors("2", torch.ones(1, 2), torch.ones(2, 1))
        >>> a.tolist(), tuple(b.shape)
        ([[1.0, 0.0, 1.0]], (2, 1))
        """
        name, (out, ins) = f"{layer}.weight", (1, 0) if transposed else (0, 1)
        return self._widened(name, ins, a, 1), self._widened(name, out, b, 0)

    def _widened(self, name: str, dim: int, tensor: Tensor, along: int) -> Tensor:
        """A tensor whose dimension `along` is `dim` of the one of this name, as the full has it."""
        full = tensor.shape[along] + len(self.removed_places(name, dim))
        if (kept := self.places(name, dim, full)) is None:
            return tensor
        shape = list(tensor.shape)
        shape[along] = full
        return tensor.new_zeros(shape).index_copy(along, kept.to(tensor.device), tensor)

    def places(self, name: str, dim: int, size: int) -> Tensor | None:
        """Which of the full tensor's `size` places along a dimension are kept; None: all."""
        gone = self.removed_places(name, dim)
        if not len(gone):
            return None
        kept = torch.ones(size, dtype=torch.bool)
        kept[gone] = False
        return kept.nonzero().flatten()

    def as_json(self) -> dict[str, dict[str, list[int]]]:
        """The kept units by module and kind, as plain values."""
        found: dict[str, dict[str, list[int]]] = {}
        for part in self.parts:
            found.setdefault(part.units.name, {})[part.units.kind] = list(part.kept)
        return found

    @classmethod
    def from_json(cls, raw: Any, full: ModelMap) -> Reduction:
        """What `as_json` wrote.

        Args:
            full: the map of the full model.

        Raises:
            InputError: `raw` names units that the model does not have.
        """
        attentions = [units for a in full.all_attentions() for units in (a.heads, a.groups)]
        every = [*attentions, *(mlp.neurons for mlp in full.all_mlps())]
        known: dict[tuple[str, str], Units] = {(units.name, units.kind): units for units in every}
        parts = []
        for name, kinds in _section(raw).items():
            for kind, kept in _section(kinds).items():
                units = known.get((name, kind))
                there = range(units.count) if units is not None else range(0)
                fits = isinstance(kept, list) and all(place in there for place in kept)
                if units is None or not fits:
                    problem = "keeps units that the full model does not have"
                    raise InputError(problem, field=f"kept.{name}", value=kind)
                parts.append(KeptUnits(units, tuple(sorted(set(kept)))))
        return cls(tuple(parts))

    def described(self) -> list[dict[str, Any]]:
        """The units with their slices, and which are kept, as plain values: no map is needed."""
        return [
            {
                "name": part.units.name,
                "kind": part.units.kind,
                "count": part.units.count,
                "kept": list(part.kept),
                _MAKERS: [_plain(piece) for piece in part.units.makers],
                _READERS: [_plain(piece) for piece in part.units.readers],
            }
            for part in self.parts
        ]

    @classmethod
    def from_description(cls, raw: Any) -> Reduction:
        """What `described` wrote.

        Raises:
            InputError: it is no description of units, or keeps some that there are not.

        >>> from modicum.core.layers.map import find_map
        >>> mlp = find_map(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))).mlps[0]
        >>> kept = Reduction((KeptUnits(mlp.neurons, (0, 2)),))
        >>> Reduction.from_description(kept.described()).places("2.weight", 1, 3).tolist()
        [0, 2]
        """
        try:
            return cls(tuple(_described(each) for each in raw))
        except (KeyError, TypeError, ValueError):
            problem = "does not describe which units of the full model are kept"
            raise InputError(problem, field="units") from None

    def removed_places(self, name: str, dim: int) -> Tensor:
        """Which of the full tensor's places along a dimension are removed, int64."""
        found = [
            piece.places().reshape(part.units.count, -1)[list(part.removed)].flatten()
            for part in self.parts
            for piece in dict.fromkeys(part.units.slices)
            if (piece.tensor, piece.dim) == (name, dim)
        ]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def _check_apart(self) -> None:
        seen: set[tuple[str, int]] = set()
        for part in self.parts:
            own = {(piece.tensor, piece.dim) for piece in part.units.slices}
            if own & seen:
                problem = "two kinds of units that share a tensor cannot be removed together"
                raise InputError(problem, value=part.units.name)
            seen |= own


def _described(raw: Mapping[str, Any]) -> KeptUnits:
    """Units by their description.

    Raises:
        ValueError: kept ones are not ascending or not there, or slices have other places.
    """
    count, kept = raw["count"], list(raw["kept"])
    there = all(type(place) is int for place in [count, *kept]) and set(kept) <= set(range(count))
    if not there or not kept or kept != sorted(set(kept)):
        raise ValueError
    makers, readers = (
        tuple(_slice(each, count) for each in raw[role]) for role in (_MAKERS, _READERS)
    )
    units = Units(raw["kind"], str(raw["name"]), count, makers, readers)
    return KeptUnits(units, tuple(kept))


def _plain(piece: MappedSlice) -> list[Any]:
    return [piece.tensor, piece.dim, piece.start, list(piece.shape), list(piece.strides)]


def _slice(raw: Any, count: int) -> MappedSlice:
    """One slice of a description of `count` units."""
    tensor, dim, start, shape, strides = raw
    numbers = (dim, start, *shape, *strides)
    counts = all(type(number) is int and number >= 0 for number in numbers)
    if not counts or dim > 1 or len(shape) != len(strides):
        raise ValueError
    if not 0 < math.prod(shape) < _WIDEST or math.prod(shape) % count:
        raise ValueError
    return MappedSlice(str(tensor), dim, start, tuple(shape), tuple(strides))


def _section(raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        problem = "which units are kept is written as a section by module, and in it by kind"
        raise InputError(problem, field="kept", value=raw)
    return raw
