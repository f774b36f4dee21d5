"""The truncated SVD: the leading part of a matrix, exactly or by a random projection."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.core.random import normal_

OVERSAMPLED = 8  # columns beyond r that a randomized SVD works on (Halko et al., section 4.2)


def truncated_svd(
    matrix: Tensor,
    rank: int | None = None,
    iterations: int | None = None,
    *,
    seed: int = 0,
    name: str = "",
    step: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, r], S [r] and V^T [r, n] of a matrix [m, n], S falling; views of the full factors.

    Args:
        rank: r; None: min(m, n).
        iterations: power iterations of a randomized SVD, whose draw is named (seed, name, step),
            and the same on every device; None: LAPACK's.

    Source: Halko, Martinsson and Tropp, arXiv 0909.4061, algorithms 4.4 and 5.1.

    >>> left, singular, right = truncated_svd(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 2)
    >>> singular, (left * singular @ right).diagonal()
    (tensor([3., 2.]), tensor([3., 2., 0.]))
    """
    rank = min(matrix.shape) if rank is None else rank
    if iterations is None:
        left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        width = min(rank + OVERSAMPLED, *matrix.shape)
        start = matrix.new_empty(matrix.shape[1], width)
        basis = torch.linalg.qr(matrix @ normal_(start, seed=seed, name=name, step=step)).Q
        for _ in range(iterations):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
        left, singular, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ left
    return left[:, :rank], singular[:rank], right[:rank]


def numerical_rank(singular: Tensor, shape: tuple[int, ...]) -> int:
    """How many singular values of a matrix of this shape are no rounding error of the largest.

    >>> numerical_rank(torch.tensor([2.0, 1.0, 1e-8]), (3, 3))
    2
    """
    least = max(shape) * torch.finfo(singular.dtype).eps * singular[0]
    return int((singular > least).sum())


def with_fixed_signs(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Singular vectors with the signs, which an SVD leaves open, the same on every machine.

    The largest entry of each column of U [m, r] is positive; V^T [r, n] follows.
    """
    largest = left.gather(0, left.abs().argmax(0, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(left)
    return left * signs, right * signs.T
