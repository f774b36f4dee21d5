"""Subspaces of coordinates: some columns, rows or entries of a matrix, or some matrices of a model.

Nothing is multiplied: what is inside is copied out, and copied back. What is kept of a subspace is
places, integers in ascending order, which are drawn by seed, step and matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.random import sample
from modicum.optim.kept import KeptTensor
from modicum.optim.projectors import MatrixShape, ProjectedScratch, ProjectedWork

SelectedKind = Literal["columns", "rows", "entries"]
TensorOrder = Literal["random", "ascending", "descending", "mirror"]
PLACES = "indices"  # their name in an optimizer's state


def places_of(count: int, below: int) -> KeptTensor:
    """What so many places below a number are kept in."""
    return KeptTensor((count,), torch.int32 if below < 2**31 else torch.int64)


def moved(values: Tensor, old: Tensor, new: Tensor, dim: int) -> Tensor:
    """Slices that stand at old places, at new ones: what stays moves along, what is new is zero.

    It is the product with the matrix [old, new] that has a 1 where two places are the same.

    Args:
        old, new: places, ascending.
        dim: the dimension of `values` along which the slices stand.

    >>> moved(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0, 4, 5]), torch.tensor([4, 7, 9]), 1)
    tensor([[2., 0., 0.]])
    """
    found = torch.searchsorted(old, new).clamp_(max=len(old) - 1)
    gone = old.index_select(0, found) != new
    return values.index_select(dim, found).index_fill_(dim, gone.nonzero().flatten(), 0)


@dataclass(frozen=True)
class CoordinateProjector:
    """Some columns, rows or single entries of a gradient, drawn anew at each refresh.

    Args:
        share: rho, of all columns, rows or entries; it is rounded, and one is there at least.
        kind: which of them.
        seed: of the draw, with the step and the matrix's number.

    Source: Zmushko et al., "FRUGAL", arXiv 2411.07837, section 4; the authors' code truncates.

    >>> projector = CoordinateProjector(0.5, "columns")
    >>> bases, inside = projector.refresh(torch.eye(4), step=0, place=0)
    >>> outside = projector.outside(torch.eye(4), inside, bases)
    >>> torch.equal(projector.up(inside, bases, (4, 4)) + outside, torch.eye(4))
    True
    """

    share: float
    kind: SelectedKind = "columns"
    seed: int = 0

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and min(shape) > 0

    def slices(self, shape: MatrixShape) -> int:
        """How many there are to choose from."""
        return {"rows": shape[0], "columns": shape[1], "entries": math.prod(shape)}[self.kind]

    def _dim(self) -> int:
        return 0 if self.kind == "rows" else 1

    def _seen(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(1, -1) if self.kind == "entries" else matrix

    def bases(self, shape: MatrixShape) -> dict[str, KeptTensor]:
        every = self.slices(shape)
        return {PLACES: places_of(max(1, round(self.share * every)), every)}

    def inner(self, shape: MatrixShape) -> MatrixShape:
        count = self.bases(shape)[PLACES].shape[0]
        return {
            "rows": (count, shape[1]),
            "columns": (shape[0], count),
            "entries": (1, count),
        }[self.kind]

    def refresh(self, gradient: Tensor, step: int, place: int) -> tuple[dict[str, Tensor], Tensor]:
        shape = gradient.shape[0], gradient.shape[1]
        kept = self.bases(shape)[PLACES]
        name = f"coordinates/{place}/{step}"
        drawn = sample(self.slices(shape), kept.shape[0], seed=self.seed, name=name)
        bases = {PLACES: drawn.to(gradient.device, kept.dtype)}
        return bases, self.down(gradient, bases)

    def down(self, gradient: Tensor, state: Mapping[str, Any]) -> Tensor:
        return self._seen(gradient).index_select(self._dim(), state[PLACES])

    def up(self, update: Tensor, state: Mapping[str, Any], shape: MatrixShape) -> Tensor:
        full = update.new_zeros(shape)
        self._seen(full).index_copy_(self._dim(), state[PLACES].long(), update)
        return full

    def outside(self, gradient: Tensor, inside: Tensor, state: Mapping[str, Any]) -> Tensor:
        found = gradient.clone(memory_format=torch.contiguous_format)
        self._seen(found).index_fill_(self._dim(), state[PLACES].long(), 0)
        return found

    def turn(
        self, moment: Tensor, old: Mapping[str, Any], new: Mapping[str, Any], *, squared: bool
    ) -> Tensor:
        return moved(moment, old[PLACES], new[PLACES], self._dim())

    def work(self, shape: MatrixShape) -> ProjectedWork:
        return ProjectedWork(0, 0, 0)

    def scratch(self, shape: MatrixShape) -> ProjectedScratch:
        count = self.bases(shape)[PLACES].elements
        # A draw of words of 64 bits, at least 128 of them; places of 64 bits.
        return ProjectedScratch(40 * max(128, count) + 4 * self.slices(shape), 2 * count)

    def shared_elements(self, shape: MatrixShape) -> dict[int, int]:
        return {}


@dataclass(frozen=True)
class TensorChoice:
    """Which of a model's matrices have moments: some of them at a time, full ones.

    Each round takes the next ones of the order, and begins again at its end. The choice is a
    function of the round alone, so ranks agree and a run that resumes finds it again.

    Args:
        share: rho, of the number of matrices; it is rounded.
        order: of the matrices as they stand in the model: `descending` begins with the last,
            `mirror` takes from both ends, `random` draws each round anew.
        seed: of the draw.

    Source: Zmushko et al., arXiv 2411.07837, section 4; Luo et al., "BAdam", arXiv 2404.02827.

    >>> choice = TensorChoice(0.5, "descending")
    >>> [sorted(choice.active(4, round_)) for round_ in (0, 1, 2)]
    [[2, 3], [0, 1], [2, 3]]
    """

    share: float
    order: TensorOrder = "descending"
    seed: int = 0

    def number(self, count: int) -> int:
        """How many of so many matrices are active.

        Raises:
            InputError: the share is not zero, but that of the matrices is.
        """
        found = int(self.share * count + 0.5)
        if count and self.share and not found:
            raise InputError(
                f"of {count} matrices that is less than half of one; take 0, or more",
                field="density",
                value=self.share,
            )
        return found

    def active(self, count: int, round_: int) -> frozenset[int]:
        """The numbers of the matrices that have moments in a round, of so many."""
        return _active(self, count, round_)

    def rounds(self, count: int) -> int | None:
        """After how many rounds the choices begin again; None: they are drawn."""
        number = self.number(count)
        if not number:
            return 1
        return None if self.order == "random" else count // math.gcd(count, number)


@functools.lru_cache(maxsize=64)
def _active(choice: TensorChoice, count: int, round_: int) -> frozenset[int]:
    number = choice.number(count)
    if choice.order == "random":
        return frozenset(sample(count, number, seed=choice.seed, name=f"tensors/{round_}").tolist())
    order = list(range(count))
    if choice.order == "descending":
        order.reverse()
    elif choice.order == "mirror":
        order = [n // 2 if n % 2 == 0 else count - 1 - n // 2 for n in range(count)]
    return frozenset(order[(round_ * number + n) % count] for n in range(number))
