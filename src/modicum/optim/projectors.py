"""Projectors: subspaces in which an optimizer keeps its moments.

A projector chooses bases from a gradient G [m, n] and maps gradients down and updates back up. It
keeps no tensors of its own: the bases stand in `optimizer.state` next to the moments. They are
whatever says which subspace it is: singular vectors, or the places of some columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from modicum.core.layers.truncated_svd import truncated_svd
from modicum.core.random import normal_
from modicum.optim.kept import KeptTensor

ProjectedSide = Literal["std", "reverse_std", "left", "right", "full"]
MatrixShape = tuple[int, int]
_POWER_ITERATIONS = 2


class ProjectedWork(NamedTuple):
    """Operations of matrix products in a refresh, on the way down without one, and up."""

    refresh: int
    down: int
    up: int


class ProjectedScratch(NamedTuple):
    """Elements of fp32 in addition to gradient, bases and results: in a refresh, in a map."""

    refresh: int
    map: int


class Projector(Protocol):
    """What an optimizer asks of a projector; `state` is its dictionary for one parameter."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape can be projected."""
        ...

    def bases(self, shape: MatrixShape) -> Mapping[str, KeptTensor]:
        """What is kept of the subspace of a matrix of this shape, by names in `state`."""
        ...

    def inner(self, shape: MatrixShape) -> MatrixShape:
        """The shape of a projected gradient."""
        ...

    def refresh(self, gradient: Tensor, step: int, place: int) -> tuple[dict[str, Tensor], Tensor]:
        """New bases for a gradient (fp32), of parameter number `place` in step number `step`.

        Returns:
            The bases, and the gradient in their subspace as `down` would have it: some come with
            what makes them, and are not multiplied again.
        """
        ...

    def down(self, gradient: Tensor, state: Mapping[str, Any]) -> Tensor:
        """A gradient in the subspace."""
        ...

    def up(self, update: Tensor, state: Mapping[str, Any], shape: MatrixShape) -> Tensor:
        """An update of the subspace in the full space of this shape, a tensor of its own."""
        ...

    def outside(self, gradient: Tensor, inside: Tensor, state: Mapping[str, Any]) -> Tensor:
        """What a gradient has outside of the subspace, a tensor of its own; `inside` is `down`'s.

        Together with `up(inside)` it is the gradient.
        """
        ...

    def turn(
        self, moment: Tensor, old: Mapping[str, Any], new: Mapping[str, Any], *, squared: bool
    ) -> Tensor:
        """A moment in the old bases as one in the new; of squares, as if they were independent."""
        ...

    def work(self, shape: MatrixShape) -> ProjectedWork:
        """Operations of matrix products."""
        ...

    def scratch(self, shape: MatrixShape) -> ProjectedScratch:
        """What a refresh takes, and a map down or up, at most."""
        ...

    def shared_elements(self, shape: MatrixShape) -> Mapping[int, int]:
        """Elements of fp32 that matrices share, by what names them: they are there once."""
        ...


@dataclass(frozen=True)
class FullSpace:
    """No subspace: of methods that work on the full gradient of a matrix."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and min(shape) > 0

    def bases(self, shape: MatrixShape) -> dict[str, KeptTensor]:
        return {}

    def inner(self, shape: MatrixShape) -> MatrixShape:
        return shape

    def refresh(self, gradient: Tensor, step: int, place: int) -> tuple[dict[str, Tensor], Tensor]:
        return {}, gradient

    def down(self, gradient: Tensor, state: Mapping[str, Any]) -> Tensor:
        return gradient

    def up(self, update: Tensor, state: Mapping[str, Any], shape: MatrixShape) -> Tensor:
        return update.clone()

    def outside(self, gradient: Tensor, inside: Tensor, state: Mapping[str, Any]) -> Tensor:
        return torch.zeros_like(gradient)

    def turn(
        self, moment: Tensor, old: Mapping[str, Any], new: Mapping[str, Any], *, squared: bool
    ) -> Tensor:
        return moment

    def work(self, shape: MatrixShape) -> ProjectedWork:
        return ProjectedWork(0, 0, 0)

    def scratch(self, shape: MatrixShape) -> ProjectedScratch:
        return ProjectedScratch(0, 0)

    def shared_elements(self, shape: MatrixShape) -> dict[int, int]:
        return {}


@dataclass(frozen=True)
class SVDProjector:
    """The leading singular vectors of G: V [rank, n], G V^T; or U [m, rank], U^T G; or both.

    Args:
        rank: r, how many.
        side: `std` reduces the smaller dimension, `reverse_std` the larger, `right` always n,
            `left` always m, `full` both (U^T G V^T, of rank x rank).
        method: `exact` is LAPACK's SVD, `randomized` a range finder with two power iterations;
            `random` draws orthonormal vectors, whatever G is.
        bits: 32, or 16 to keep bases in bf16.
        seed: of the range finder, and of random vectors.
        share: in place of r, the part of the smaller dimension; rounded, and one at least.

    Source: Zhao et al., arXiv 2403.03507, definition 3.4 and section 4.1, with the sides of the
    authors' code; Halko, Martinsson and Tropp, arXiv 0909.4061, algorithms 4.4 and 5.1.
    """

    rank: int
    side: ProjectedSide = "std"
    method: Literal["exact", "randomized", "random"] = "exact"
    bits: Literal[32, 16] = 32
    seed: int = 0
    share: float | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and min(shape) >= self.rank

    def slices(self, shape: MatrixShape) -> int:
        """How many singular vectors a matrix of this shape has."""
        return min(shape)

    def ranks(self, shape: MatrixShape) -> int:
        """How many singular vectors of a matrix of this shape are kept."""
        return self.rank if self.share is None else max(1, round(self.share * min(shape)))

    def bases(self, shape: MatrixShape) -> dict[str, KeptTensor]:
        rank, dtype = self.ranks(shape), torch.float32 if self.bits == 32 else torch.bfloat16
        left = {"left": KeptTensor((shape[0], rank), dtype)}
        right = {"right": KeptTensor((rank, shape[1]), dtype)}
        tall = shape[0] >= shape[1]
        by_side: dict[ProjectedSide, dict[str, KeptTensor]] = {
            "left": left,
            "right": right,
            "full": left | right,
            "std": right if tall else left,
            "reverse_std": left if tall else right,
        }
        return by_side[self.side]

    def inner(self, shape: MatrixShape) -> MatrixShape:
        bases, rank = self.bases(shape), self.ranks(shape)
        return (rank if "left" in bases else shape[0], rank if "right" in bases else shape[1])

    def refresh(self, gradient: Tensor, step: int, place: int) -> tuple[dict[str, Tensor], Tensor]:
        kept = self.bases((gradient.shape[0], gradient.shape[1]))
        found: dict[str, Tensor] = {}
        rank = self.ranks((gradient.shape[0], gradient.shape[1]))
        if self.method == "exact":
            left, _, right = truncated_svd(gradient, rank)
            found = {"left": left, "right": right}
        else:
            for name in kept:
                # The row space of G is the column space of its transpose.
                matrix = gradient if name == "left" else gradient.T
                vectors = self._drawn(matrix, rank, step, f"projector/{place}/{name}")
                found[name] = vectors if name == "left" else vectors.T
        # Copies, since a slice would keep all singular vectors.
        bases = {name: _own(found[name], one.dtype) for name, one in kept.items()}
        return bases, self.down(gradient, bases)

    def _drawn(self, matrix: Tensor, rank: int, step: int, name: str) -> Tensor:
        """Columns [rows, rank] that are drawn, from the range of a matrix or from anywhere."""
        if self.method == "random":
            start = matrix.new_empty(matrix.shape[0], rank)
            return torch.linalg.qr(normal_(start, seed=self.seed, name=name, step=step)).Q
        found = truncated_svd(matrix, rank, _POWER_ITERATIONS, seed=self.seed, name=name, step=step)
        return found[0]

    def down(self, gradient: Tensor, state: Mapping[str, Any]) -> Tensor:
        if "left" in state:
            gradient = state["left"].float().T @ gradient
        return gradient @ state["right"].float().T if "right" in state else gradient

    def up(self, update: Tensor, state: Mapping[str, Any], shape: MatrixShape) -> Tensor:
        if "left" in state:
            update = state["left"].float() @ update
        return update @ state["right"].float() if "right" in state else update

    def outside(self, gradient: Tensor, inside: Tensor, state: Mapping[str, Any]) -> Tensor:
        within = self.up(inside, state, (gradient.shape[0], gradient.shape[1]))
        return torch.sub(gradient, within, out=within)

    def turn(
        self, moment: Tensor, old: Mapping[str, Any], new: Mapping[str, Any], *, squared: bool
    ) -> Tensor:
        power: Callable[[Tensor], Tensor] = torch.square if squared else torch.positive
        if "left" in new:
            moment = power(new["left"].float().T @ old["left"].float()) @ moment
        if "right" in new:
            moment = moment @ power(old["right"].float() @ new["right"].float().T)
        return moment

    def work(self, shape: MatrixShape) -> ProjectedWork:
        (m, n), (rows, columns) = shape, self.inner(shape)
        bases, total = self.bases(shape), 0
        if "left" in bases:
            total += 2 * rows * m * n
        if "right" in bases:
            total += 2 * rows * n * columns
        up = (2 * m * rows * columns if "left" in bases else 0) + (
            2 * m * columns * n if "right" in bases else 0
        )
        return ProjectedWork(total, total, up)

    def scratch(self, shape: MatrixShape) -> ProjectedScratch:
        small, large = min(shape), max(shape)
        cast = sum(one.elements for one in self.bases(shape).values()) if self.bits == 16 else 0
        # LAPACK's gesdd: a copy of G, U, V and its scratch.
        return ProjectedScratch(2 * large * small + 8 * small**2 + 96 * (large + small), cast)

    def shared_elements(self, shape: MatrixShape) -> dict[int, int]:
        return {}


def _own(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    return vectors.to(dtype, copy=True, memory_format=torch.contiguous_format)
