"""The leading part of a matrix, exactly or by a random projection, alike on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.core.random import normal_

OVERSAMPLED = 8  # columns beyond r that a randomized SVD works on (Halko et al., section 4.2)


def leading_triplets(
    matrix: Tensor, rank: int, niter: int | None, *, seed: int = 0, name: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, r], S [r] and V^T [r, n] of a matrix fp32 [m, n], S falling.

    Signs, which an SVD leaves open, are fixed: the largest entry of each column of U is positive.

    Args:
        niter: power iterations of a randomized SVD, whose draw is named (seed, name); None: exact.

    Source: Halko, Martinsson and Tropp, arXiv 0909.4061, algorithms 4.4 and 5.1.

    >>> left, singular, right = leading_triplets(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 2, None)
    >>> singular, (left * singular @ right).diagonal()
    (tensor([3., 2.]), tensor([3., 2., 0.]))
    """
    if niter is None:
        left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        width = min(rank + OVERSAMPLED, *matrix.shape)
        start = normal_(torch.empty(matrix.shape[1], width), seed=seed, name=name)
        basis = torch.linalg.qr(matrix @ start.to(matrix)).Q
        for _ in range(niter):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
        left, singular, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ left
    left, singular, right = left[:, :rank], singular[:rank], right[:rank]
    largest = left.gather(0, left.abs().argmax(0, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(matrix)
    return left * signs, singular, right * signs.T
