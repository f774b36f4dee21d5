"""The discrete cosine transform as a basis of all matrices of a width, and its best columns.

One orientation is used everywhere: Q = D^T for the DCT-II matrix D [n, n] with orthonormal rows, so
G Q is the transform of the rows of G. The basis is fixed, so what is kept of a subspace is which of
its columns span it.

Source: Modoranu et al., "SVD-Free Low-Rank Adaptive Gradient Optimization for Large Language
Models", arXiv 2505.17967, sections 3 and 4; Makhoul, "A fast cosine transform in one and two
dimensions", IEEE Transactions on Acoustics, Speech, and Signal Processing 28(1), 1980.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from modicum.optim.kept import KeptTensor
from modicum.optim.projectors import MatrixShape, ProjectedScratch, ProjectedWork
from modicum.optim.selections import PLACES, moved, places_of

Transform = Literal["fft", "product"]


@functools.cache
def dct_basis(width: int, device: torch.device) -> Tensor:
    """D [width, width] in fp32, made once for a width and a device; it must not be changed.

    D[i, j] = sqrt(2 / n) cos(pi i (2 j + 1) / (2 n)), and row 0 over sqrt 2.

    >>> basis = dct_basis(5, torch.device("cpu"))
    >>> torch.allclose(basis @ basis.T, torch.eye(5), atol=1e-6)
    True
    """
    column = torch.arange(width, device="cpu")  # not all accelerators have fp64
    row = column[:, None]
    # The period is 4 n: of a smaller argument the cosine is exact.
    turns = (row * (2 * column + 1)) % (4 * width)
    found = turns.double().mul_(math.pi / (2 * width)).cos_().mul_(math.sqrt(2 / width))
    found[0] /= math.sqrt(2)
    return found.float().to(device)


@functools.cache
def _twiddles(width: int, device: torch.device) -> Tensor:
    """The factors of the first half of a transform by FFT, complex64 [width // 2 + 1]."""
    angle = torch.arange(width // 2 + 1, device="cpu").double() * (-math.pi / (2 * width))
    size = torch.full_like(angle, math.sqrt(2 / width))
    size[0] = math.sqrt(1 / width)
    return torch.polar(size, angle).to(torch.complex64).to(device)


def dct(matrix: Tensor) -> Tensor:
    """The DCT-II of the rows of a matrix [m, n] (fp32) by FFT: G D^T in O(m n log n).

    >>> matrix = torch.arange(12.0).view(3, 4)
    >>> expected = matrix @ dct_basis(4, matrix.device).T
    >>> torch.allclose(dct(matrix), expected, atol=1e-5)
    True
    """
    width = matrix.shape[1]
    # Evens ascending, then odds descending.
    ordered = torch.cat([matrix[:, ::2], matrix[:, 1::2].flip(1)], 1)
    half = torch.fft.rfft(ordered, dim=1)
    del ordered
    half.mul_(_twiddles(width, matrix.device))
    found = matrix.new_empty(matrix.shape)
    found[:, : width // 2 + 1] = half.real
    # Of real numbers the second half of the transform is the conjugate of the first.
    found[:, width // 2 + 1 :] = half.imag[:, 1 : (width + 1) // 2].flip(1).neg_()
    return found


@dataclass(frozen=True)
class DCTProjector:
    """The r columns of the DCT basis that have most of a gradient: G Q[:, chosen].

    Of G [m, n], m >= n, the columns of S = G Q are scored by their norms, and the largest are
    chosen; they are the projected gradient, and r integers are all that is kept. Where m < n
    the columns of G are transformed, and rows of Q^T G chosen.

    Args:
        rank: r.
        norm: by which columns are scored: with 2 no other r columns have more of the energy.
        transform: how S is made: by FFT, or by a product with the basis.
        largest: a matrix with a dimension of so many is not projected.

    >>> projector = DCTProjector(2)
    >>> gradient = torch.ones(6, 4)
    >>> bases, inside = projector.refresh(gradient, step=0, place=0)
    >>> bases["indices"].dtype, tuple(inside.shape)
    (torch.int32, (6, 2))
    >>> torch.allclose(projector.up(inside, bases, (6, 4)), gradient, atol=1e-6)
    True
    """

    rank: int
    norm: Literal[1, 2] = 1
    transform: Transform = "fft"
    largest: int = 32000

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and min(shape) >= self.rank and max(shape) < self.largest

    def bases(self, shape: MatrixShape) -> dict[str, KeptTensor]:
        return {PLACES: places_of(self.rank, min(shape))}

    def inner(self, shape: MatrixShape) -> MatrixShape:
        return (shape[0], self.rank) if _tall(shape) else (self.rank, shape[1])

    def refresh(self, gradient: Tensor, step: int, place: int) -> tuple[dict[str, Tensor], Tensor]:
        tall = _tall(gradient.shape)
        side = gradient if tall else gradient.mT
        if self.transform == "fft":
            full = dct(side)
        else:
            full = side @ dct_basis(side.shape[1], gradient.device).mT
        # A sum over rows is much faster than `vector_norm` along them.
        score = (full.abs() if self.norm == 1 else full.square()).sum(0)
        # Ascending, so that all who choose the same have the same order.
        chosen = score.topk(self.rank, sorted=False).indices.sort().values
        inside = full.index_select(1, chosen)
        kept = self.bases((gradient.shape[0], gradient.shape[1]))[PLACES]
        return {PLACES: chosen.to(kept.dtype)}, inside if tall else inside.mT.contiguous()

    def down(self, gradient: Tensor, state: Mapping[str, Any]) -> Tensor:
        rows = _rows(state, min(gradient.shape))
        return gradient @ rows.mT if _tall(gradient.shape) else rows @ gradient

    def up(self, update: Tensor, state: Mapping[str, Any], shape: MatrixShape) -> Tensor:
        rows = _rows(state, min(shape))
        return update @ rows if _tall(shape) else rows.mT @ update

    def outside(self, gradient: Tensor, inside: Tensor, state: Mapping[str, Any]) -> Tensor:
        within = self.up(inside, state, (gradient.shape[0], gradient.shape[1]))
        return torch.sub(gradient, within, out=within)

    def turn(
        self, moment: Tensor, old: Mapping[str, Any], new: Mapping[str, Any], *, squared: bool
    ) -> Tensor:
        dim = 1 if moment.shape[1] == len(new[PLACES]) else 0
        return moved(moment, old[PLACES], new[PLACES], dim)

    def work(self, shape: MatrixShape) -> ProjectedWork:
        small, large = min(shape), max(shape)
        product = 2 * large * small * small if self.transform == "product" else 0
        return ProjectedWork(product, *[2 * large * small * self.rank] * 2)

    def scratch(self, shape: MatrixShape) -> ProjectedScratch:
        # The transform, and by FFT what is ordered, its half and the FFT's own copies.
        copies = 5 if self.transform == "fft" else 2
        return ProjectedScratch(math.prod(shape) * copies + 16 * max(shape), self.rank * min(shape))

    def shared_elements(self, shape: MatrixShape) -> dict[int, int]:
        return {min(shape): min(shape) ** 2}


def _tall(shape: tuple[int, ...]) -> bool:
    return shape[0] >= shape[1]


def _rows(state: Mapping[str, Any], width: int) -> Tensor:
    """The chosen rows of D: fp32 [rank, width]."""
    places: Tensor = state[PLACES]
    return dct_basis(width, places.device).index_select(0, places)
