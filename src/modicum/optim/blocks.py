"""Rules that take a matrix block by block, with square factors on both sides of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from modicum.optim.kept import KeptTensor

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class MatrixBlock:
    """Rows and columns of a matrix, and where its factors begin in the tensors of all of them."""

    rows: slice
    columns: slice
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    def of(self, matrix: Tensor) -> Tensor:
        """The block of a matrix, a view."""
        return matrix[self.rows, self.columns]


def pieces(length: int, most: int) -> list[slice]:
    """A length in as few pieces of at most so much as there can be, alike but for the last.

    >>> [[(one.start, one.stop) for one in pieces(*sizes)] for sizes in ((10, 4), (384, 256))]
    [[(0, 4), (4, 8), (8, 10)], [(0, 192), (192, 384)]]
    """
    each = -(-length // max(1, -(-length // most)))
    return [slice(start, min(start + each, length)) for start in range(0, length, each)]


class BlockRule(ABC):
    """A rule for full matrices [m, n]: blocks with a left [r, r] and a right [c, c] factor each.

    The factors of all blocks stand one after the other in flat tensors, next to the moments, which
    have the matrix's shape.

    Attributes:
        block_size: rows and columns of a block, at most.
        moments: names of what has the matrix's shape, and whether it is a mean of squares.
        factors: names of kinds of factors; `left_NAME` and `right_NAME` are kept.
    """

    block_size: int
    moments: ClassVar[Mapping[str, bool]]
    factors: ClassVar[tuple[str, ...]]

    @abstractmethod
    def of_block(self, gradient: Tensor, kept: Mapping[str, Tensor], age: int) -> Tensor:
        """The direction of one block [r, c]; change what is kept of it in place.

        Args:
            kept: its moments and factors, and what is `drawn`.
        """

    @abstractmethod
    def block_flops(self, rows: int, columns: int) -> int:
        """Operations of a block's matrix products, of a step that does all of them."""

    def drawn(self, like: Tensor, age: int, place: int) -> Mapping[str, Tensor]:
        """What is drawn in this step for matrix number `place`, of its shape; nothing."""
        return {}

    def agreed(self, age: int) -> tuple[str, ...]:
        """What ranks that do the same must take from the first after this step.

        It is what a decomposition has made, which may differ between hosts of different kinds.
        """
        return ()

    def blocks(self, shape: _Shape) -> Iterator[MatrixBlock]:
        """The blocks of a matrix, row by row of them."""
        rows, columns = shape
        left = right = 0
        for over in pieces(rows, self.block_size):
            for along in pieces(columns, self.block_size):
                block = MatrixBlock(over, along, left, right)
                yield block
                left, right = left + block.shape[0] ** 2, right + block.shape[1] ** 2

    def state(self, shape: _Shape) -> dict[str, KeptTensor]:
        """Moments of the matrix's shape, and the factors of all blocks."""
        kept = {name: KeptTensor(shape, squared=squared) for name, squared in self.moments.items()}
        sizes = [block.shape for block in self.blocks(shape)]
        for name in self.factors:
            kept[f"left_{name}"] = KeptTensor((sum(rows**2 for rows, _ in sizes),), bits=32)
            kept[f"right_{name}"] = KeptTensor((sum(columns**2 for _, columns in sizes),), bits=32)
        return kept

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        """As of matrix number 0."""
        return self.direction_at(gradient, moments, age, 0)

    def direction_at(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int, place: int
    ) -> tuple[Tensor, float]:
        """The direction of matrix number `place`, and the factor.

        Args:
            moments: what `state` names.
            age: how many gradients they have seen, this one included.
        """
        found = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        full = {name: moments[name] for name in self.moments}
        full |= self.drawn(found, age, place)
        for block in self.blocks(tuple(gradient.shape)):
            rows, columns = block.shape
            kept = {name: block.of(tensor) for name, tensor in full.items()}
            for name in self.factors:
                left = moments[f"left_{name}"].narrow(0, block.left, rows**2)
                right = moments[f"right_{name}"].narrow(0, block.right, columns**2)
                kept |= {f"left_{name}": left.view(rows, rows)}
                kept |= {f"right_{name}": right.view(columns, columns)}
            block.of(found).copy_(self.of_block(block.of(gradient), kept, age))
        return found, 1.0

    def flops(self, shape: _Shape) -> int:
        """Operations of the matrix products of a matrix."""
        return sum(self.block_flops(*block.shape) for block in self.blocks(shape))

    def scratch_elements(self, shape: _Shape) -> int:
        """Elements in addition to gradient, what is kept and the direction, at most.

        Six tensors of a block's shape, and eight factors: LAPACK's copy and workspace of one, its
        result, and products.
        """
        sizes = [block.shape for block in self.blocks(shape)]
        return max(6 * rows * columns + 8 * max(rows, columns) ** 2 for rows, columns in sizes)
