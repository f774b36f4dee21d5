"""A randomized SVD against the exact one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modicum.core.layers.truncated_svd import truncated_svd, with_fixed_signs
from modicum.proofs.contracts.adapters.subjects import numbers


def signed(matrix: Tensor, iterations: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    left, singular, right = truncated_svd(matrix, 3, iterations, name="a")
    left, right = with_fixed_signs(left, right)
    return left, singular, right


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (9, 8)])
def test_a_randomized_svd_comes_near_and_is_a_function_of_seed_and_name(
    shape: tuple[int, int],
) -> None:
    left = torch.linalg.qr(numbers(shape[0], 8, name="left")).Q
    right = torch.linalg.qr(numbers(shape[1], 8, name="right")).Q
    matrix = left @ torch.diag(0.5 ** torch.arange(8)) @ right.T + 1e-3 * numbers(*shape)
    exact = signed(matrix)
    near = signed(matrix, 4)
    for one, other in zip(exact, near, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    again = signed(matrix, 4)
    assert all(torch.equal(one, other) for one, other in zip(near, again, strict=True))
    # Its draw is used: one iteration on a flat spectrum depends on it.
    flat = numbers(60, 50)
    draws = [truncated_svd(flat, 3, 1, seed=seed, name="a")[1] for seed in (0, 1)]
    assert not torch.equal(*draws)
    largest = exact[0].gather(0, exact[0].abs().argmax(0, keepdim=True))
    assert (largest > 0).all()
