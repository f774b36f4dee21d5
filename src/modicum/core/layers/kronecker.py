"""Matrices as sums of Kronecker products: shapes of the factors, and the best sum of r products.

W [rows, columns] is the sum over k of kron(A_k, B_k), with A_k [m1, n1] and B_k [m2, n2]. Where
each block of W is made a row of a matrix R(W) [m1 n1, m2 n2], kron(A, B) becomes the product of a
column and a row, so the SVD of R(W) gives the best sum of every length (Van Loan and Pitsianis,
1993). Without the change of order R(W) would be another matrix, whose terms are no products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch.nn.functional as F
from torch import Tensor

from modicum.core.layers.basis_cache import kept_svd
from modicum.core.layers.truncated_svd import with_fixed_signs

# Of a width: factors of which one is more times the other make terms of many numbers; then the
# width is padded to one that has factors.
_LOPSIDED = 3
# The shorter side of R(W) above which its SVD is a randomized one, where nobody says.
LARGE = 1024
_ITERATIONS = 8


@dataclass(frozen=True)
class KroneckerShape:
    """Shapes of the factors of a matrix [rows, columns], which may be padded with zeros to fit.

    Args:
        outer: (m1, n1), of the A_k.
        inner: (m2, n2), of the B_k; m1 m2 >= rows, n1 n2 >= columns.
    """

    rows: int
    columns: int
    outer: tuple[int, int]
    inner: tuple[int, int]

    @classmethod
    def of(cls, rows: int, columns: int) -> KroneckerShape:
        """The shapes whose terms have the highest rank, and of these the fewest numbers.

        A width is split into two numbers as near to each other as they can be. Where one would be
        over 3 times the other, as with primes, the width is padded to the next that splits better.

        >>> KroneckerShape.of(4096, 4096).outer, KroneckerShape.of(768, 3072)
        ((64, 64), KroneckerShape(rows=768, columns=3072, outer=(32, 48), inner=(24, 64)))
        >>> KroneckerShape.of(13, 7)
        KroneckerShape(rows=13, columns=7, outer=(4, 3), inner=(4, 3))
        """
        return _shape_of(rows, columns)

    @property
    def numbers(self) -> int:
        """Of one term: m1 n1 + m2 n2."""
        return math.prod(self.outer) + math.prod(self.inner)

    @property
    def terms(self) -> int:
        """How many terms are enough for any matrix."""
        return min(math.prod(self.outer), math.prod(self.inner))

    @property
    def rank(self) -> int:
        """The rank that one term may have."""
        most = min(self.outer) * min(self.inner)
        return min(most, self.rows, self.columns)

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of a product."""
        return self.outer[0] * self.inner[0], self.outer[1] * self.inner[1]

    def rearranged(self, matrix: Tensor) -> Tensor:
        """R(W) [m1 n1, m2 n2] of W [rows, columns]: its blocks as rows, block (i1, j1) after block.

        >>> import torch
        >>> shape = KroneckerShape(6, 2, outer=(3, 1), inner=(2, 2))
        >>> a, b = torch.tensor([[1.0], [2.0], [3.0]]), torch.eye(2)
        >>> torch.equal(shape.rearranged(torch.kron(a, b)), a.view(3, 1) @ b.view(1, 4))
        True
        """
        rows, columns = self.padded
        filled = F.pad(matrix, (0, columns - self.columns, 0, rows - self.rows))
        (m1, n1), (m2, n2) = self.outer, self.inner
        blocks = filled.reshape(m1, m2, n1, n2).transpose(1, 2)
        return blocks.reshape(m1 * n1, m2 * n2)

    def product(self, outer: Tensor, inner: Tensor) -> Tensor:
        """The sum over k of kron(A_k, B_k), [rows, columns], for A [r, m1, n1] and B [r, m2, n2].

        >>> import torch
        >>> shape = KroneckerShape(2, 2, outer=(1, 2), inner=(2, 1))
        >>> shape.product(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0], [4.0]]]))
        tensor([[3., 6.],
                [4., 8.]])
        """
        (m1, n1), (m2, n2) = self.outer, self.inner
        made = outer.flatten(1).T @ inner.flatten(1)
        blocks = made.view(m1, n1, m2, n2).transpose(1, 2).reshape(self.padded)
        return blocks[: self.rows, : self.columns]


@lru_cache(maxsize=1024)
def _shape_of(rows: int, columns: int) -> KroneckerShape:
    (small, large), (narrow, wide) = _split(rows), _split(columns)
    found = [
        KroneckerShape(rows, columns, outer, inner)
        for outer, inner in (
            ((small, narrow), (large, wide)),
            ((large, wide), (small, narrow)),
            ((small, wide), (large, narrow)),
            ((large, narrow), (small, wide)),
        )
    ]
    return min(found, key=lambda shape: (-shape.rank, shape.numbers, _work(shape)))


def _work(shape: KroneckerShape) -> int:
    """Products of one position, B_k first."""
    (m1, n1), (m2, n2) = shape.outer, shape.inner
    return n1 * m2 * (n2 + m1)


def _split(width: int) -> tuple[int, int]:
    """Two numbers, the smaller first, whose product is the width or a little more."""
    root = math.isqrt(width)
    small = next(number for number in range(root, 0, -1) if width % number == 0)
    if width // small <= _LOPSIDED * small:
        return small, width // small
    large = root if root * root == width else root + 1
    return tuple(sorted((large, -(-width // large))))  # type: ignore[return-value]


def kept_kronecker_svd(
    matrix: Tensor,
    shape: KroneckerShape,
    terms: int | None = None,
    iterations: int | None = None,
    *,
    seed: int = 0,
    name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """(A [r, m1, n1], sigma [r], B [r, m2, n2]) of the best sum of sigma_k kron(A_k, B_k) for W.

    A_k and B_k have norm 1, sigma falls, and the squared error is the sum of the other sigma^2.
    Made once for the same numbers, as `kept_svd`; signs are fixed.

    Args:
        terms: r; None: as many as there are, by an exact SVD, whatever the size.
        iterations: power iterations of a randomized SVD, whose draw is named (seed, name); None:
            an exact one, and where R(W) has more than 1,024 rows and columns, 8.
    """
    arranged = shape.rearranged(matrix)
    if terms is not None and iterations is None and shape.terms > LARGE:
        iterations = _ITERATIONS
    left, values, right = kept_svd(arranged, terms, iterations, seed=seed, name=name)
    left, right = with_fixed_signs(left, right)
    return left.T.reshape(-1, *shape.outer), values, right.reshape(-1, *shape.inner)
