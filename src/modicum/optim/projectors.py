"""Projectors: subspaces in which an optimizer keeps its moments.

A projector chooses bases from a gradient G [m, n] and maps gradients down and updates back up. It
keeps no tensors of its own: the bases stand in `optimizer.state` beside the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from modicum.core.random import normal_

Side = Literal["std", "reverse_std", "left", "right", "full"]
Shape = tuple[int, int]
_OVERSAMPLING, _POWER_ITERATIONS = 8, 2


class Projector(Protocol):
    """What an optimizer asks of a projector; `state` is its dictionary for one parameter."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a basis."""
        ...

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape can be projected."""
        ...

    def bases(self, shape: Shape) -> Mapping[str, Shape]:
        """The bases of a matrix of this shape by their names in `state`, and their shapes."""
        ...

    def inner(self, shape: Shape) -> Shape:
        """The shape of a projected gradient."""
        ...

    def find(self, gradient: Tensor, step: int, place: int) -> dict[str, Tensor]:
        """New bases for a gradient (fp32), of parameter number `place` in step number `step`."""
        ...

    def down(self, gradient: Tensor, state: Mapping[str, Any]) -> Tensor:
        """A gradient in the subspace."""
        ...

    def up(self, update: Tensor, state: Mapping[str, Any]) -> Tensor:
        """An update of the subspace in the whole space, a tensor of its own."""
        ...

    def turn(
        self, moment: Tensor, old: Mapping[str, Any], new: Mapping[str, Any], *, squared: bool
    ) -> Tensor:
        """A moment in the old bases as one in the new; of squares, as if they were independent."""
        ...


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
    side: Side = "std"
    method: Literal["exact", "randomized"] = "exact"
    bits: Literal[32, 16] = 32
    seed: int = 0

    @property
    def element_bytes(self) -> int:
        return self.bits // 8

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and min(shape) >= self.rank

    def bases(self, shape: Shape) -> dict[str, Shape]:
        left, right = {"left": (shape[0], self.rank)}, {"right": (self.rank, shape[1])}
        tall = shape[0] >= shape[1]
        by_side: dict[Side, dict[str, Shape]] = {
            "left": left,
            "right": right,
            "full": left | right,
            "std": right if tall else left,
            "reverse_std": left if tall else right,
        }
        return by_side[self.side]

    def inner(self, shape: Shape) -> Shape:
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
            left, _, right = torch.linalg.svd(gradient, full_matrices=False)
            # Copies, since a slice would keep all singular vectors.
            found = {"left": left[:, : self.rank], "right": right[: self.rank]}
        else:
            for name in names:
                # The row space of G is the column space of its transpose.
                matrix = gradient if name == "left" else gradient.T
                vectors = self._range(matrix, f"{place}/{name}", step)
                found[name] = vectors if name == "left" else vectors.T
        return {name: _own(found[name], dtype) for name in names}

    def _range(self, matrix: Tensor, name: str, step: int) -> Tensor:
        """The leading left singular vectors of a matrix [m, n], nearly: [m, rank]."""
        width = min(self.rank + _OVERSAMPLING, *matrix.shape)
        start = torch.empty(matrix.shape[1], width, device=matrix.device)
        normal_(start, seed=self.seed, name=f"projector/{name}", step=step)
        basis = torch.linalg.qr(matrix @ start)[0]
        for _ in range(_POWER_ITERATIONS):
            basis = torch.linalg.qr(matrix.T @ basis)[0]
            basis = torch.linalg.qr(matrix @ basis)[0]
        inside = torch.linalg.svd(basis.T @ matrix, full_matrices=False)[0]
        return basis @ inside[:, : self.rank]

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
