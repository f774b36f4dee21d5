"""Projectors: subspaces in which an optimizer keeps its moments.

A projector chooses bases from a gradient G [m, n] and maps gradients down and updates back up. It
keeps no tensors of its own: the bases stand in `optimizer.state` next to the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from modicum.core.layers.truncated_svd import truncated_svd

ProjectedSide = Literal["std", "reverse_std", "left", "right", "full"]
MatrixShape = tuple[int, int]
_POWER_ITERATIONS = 2


class Projector(Protocol):
    """What an optimizer asks of a projector; `state` is its dictionary for one parameter."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a basis."""
        ...

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape can be projected."""
        ...

    def bases(self, shape: MatrixShape) -> Mapping[str, MatrixShape]:
        """The bases of a matrix of this shape by their names in `state`, and their shapes."""
        ...

    def inner(self, shape: MatrixShape) -> MatrixShape:
        """The shape of a projected gradient."""
        ...

    def find(self, gradient: Tensor, step: int, place: int) -> dict[str, Tensor]:
        """New bases for a gradient (fp32), of parameter number `place` in step number `step`."""
        ...

    def down(self, gradient: Tensor, state: Mapping[str, Any]) -> Tensor:
        """A gradient in the subspace."""
        ...

    def up(self, update: Tensor, state: Mapping[str, Any]) -> Tensor:
        """An update of the subspace in the full space, a tensor of its own."""
        ...

    def turn(
        self, moment: Tensor, old: Mapping[str, Any], new: Mapping[str, Any], *, squared: bool
    ) -> Tensor:
        """A moment in the old bases as one in the new; of squares, as if they were independent."""
        ...


@dataclass(frozen=True)
class FullSpace:
    """No subspace: of methods that work on the full gradient of a matrix."""

    element_bytes: int = 4

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and min(shape) > 0

    def bases(self, shape: MatrixShape) -> dict[str, MatrixShape]:
        return {}

    def inner(self, shape: MatrixShape) -> MatrixShape:
        return shape

    def find(self, gradient: Tensor, step: int, place: int) -> dict[str, Tensor]:
        return {}

    def down(self, gradient: Tensor, state: Mapping[str, Any]) -> Tensor:
        return gradient

    def up(self, update: Tensor, state: Mapping[str, Any]) -> Tensor:
        return update.clone()

    def turn(
        self, moment: Tensor, old: Mapping[str, Any], new: Mapping[str, Any], *, squared: bool
    ) -> Tensor:
        return moment


@dataclass(frozen=True)
class SVDProjector:
    """The leading singular vectors of G: V [rank, n], G V^T; or U [m, rank], U^T G; or both.

    Args:
        rank: r, how many.
        side: `std` reduces the smaller dimension, `reverse_std` the larger, `right` always n,
            `left` always m, `full` both (U^T G V^T, of rank x rank).
        method: `exact` is LAPACK's SVD, `randomized` a range finder with two power iterations.
        bits: 32, or 16 to keep bases in bf16.
        seed: of the range finder.

    Source: Zhao et al., arXiv 2403.03507, definition 3.4 and section 4.1, with the sides of the
    authors' code; Halko, Martinsson and Tropp, arXiv 0909.4061, algorithms 4.4 and 5.1.
    """

    rank: int
    side: ProjectedSide = "std"
    method: Literal["exact", "randomized"] = "exact"
    bits: Literal[32, 16] = 32
    seed: int = 0

    @property
    def element_bytes(self) -> int:
        return self.bits // 8

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and min(shape) >= self.rank

    def bases(self, shape: MatrixShape) -> dict[str, MatrixShape]:
        left, right = {"left": (shape[0], self.rank)}, {"right": (self.rank, shape[1])}
        tall = shape[0] >= shape[1]
        by_side: dict[ProjectedSide, dict[str, MatrixShape]] = {
            "left": left,
            "right": right,
            "full": left | right,
            "std": right if tall else left,
            "reverse_std": left if tall else right,
        }
        return by_side[self.side]

    def inner(self, shape: MatrixShape) -> MatrixShape:
        bases = self.bases(shape)
        return (
            self.rank if "left" in bases else shape[0],
            self.rank if "right" in bases else shape[1],
        )

    def find(self, gradient: Tensor, step: int, place: int) -> dict[str, Tensor]:
        names = self.bases((gradient.shape[0], gradient.shape[1]))
        dtype = torch.float32 if self.bits == 32 else torch.bfloat16
        found: dict[str, Tensor] = {}
        if self.method == "exact":
            left, _, right = truncated_svd(gradient, self.rank)
            found = {"left": left, "right": right}
        else:
            for name in names:
                # The row space of G is the column space of its transpose.
                matrix = gradient if name == "left" else gradient.T
                drawn = f"projector/{place}/{name}"
                vectors, _, _ = truncated_svd(
                    matrix, self.rank, _POWER_ITERATIONS, seed=self.seed, name=drawn, step=step
                )
                found[name] = vectors if name == "left" else vectors.T
        # Copies, since a slice would keep all singular vectors.
        return {name: _own(found[name], dtype) for name in names}

    def down(self, gradient: Tensor, state: Mapping[str, Any]) -> Tensor:
        if "left" in state:
            gradient = state["left"].float().T @ gradient
        return gradient @ state["right"].float().T if "right" in state else gradient

    def up(self, update: Tensor, state: Mapping[str, Any]) -> Tensor:
        if "left" in state:
            update = state["left"].float() @ update
        return update @ state["right"].float() if "right" in state else update

    def turn(
        self, moment: Tensor, old: Mapping[str, Any], new: Mapping[str, Any], *, squared: bool
    ) -> Tensor:
        power: Callable[[Tensor], Tensor] = torch.square if squared else torch.positive
        if "left" in new:
            moment = power(new["left"].float().T @ old["left"].float()) @ moment
        if "right" in new:
            moment = moment @ power(old["right"].float() @ new["right"].float().T)
        return moment


def _own(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    return vectors.to(dtype, copy=True, memory_format=torch.contiguous_format)
