"""Newton-Schulz: what becomes of singular values, whatever shape and company."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modicum.optim.orthogonal import NewtonSchulz
from modicum.proofs.contracts.optim.subjects import numbers

CONVERGING = (15 / 8, -10 / 8, 3 / 8)


def with_values(values: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix with these singular values."""
    left = torch.linalg.qr(numbers(rows, len(values), name="left"))[0]
    right = torch.linalg.qr(numbers(columns, len(values), name="right"))[0]
    return (left * values) @ right.T


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (48, 48)])
def test_singular_values_from_a_hundredth_to_one_come_near_one(
    shape: tuple[int, int], dtype: Literal["fp32", "bf16"]
) -> None:
    # One value is so much larger that its norm is the matrix's: it is 1, the others as they are.
    values = torch.cat([torch.ones(1), torch.logspace(-2, -1, 47)])
    matrix = with_values(values, *shape)
    values = values / matrix.norm()
    assert values.min() < 0.01
    found = torch.linalg.svdvals(NewtonSchulz(dtype=dtype)(matrix))
    of = values >= 0.01
    kept = found.sort(descending=True).values
    assert found.max() < 1.14 + 0.01
    # The polynomial keeps no order among them, so those below a hundredth are counted, not named.
    assert (kept > 0.68 - 0.01).sum() >= of.sum()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_a_matrix_has_the_bits_that_it_would_have_alone_or_transposed(
    rows: int, columns: int, count: int
) -> None:
    iteration = NewtonSchulz(dtype="fp32")
    matrices = [numbers(rows, columns, name=f"{index}") for index in range(count)]
    together = [matrix.clone() for matrix in matrices]
    iteration.apply_(together)
    for matrix, found in zip(matrices, together, strict=True):
        assert torch.equal(iteration(matrix), found)
        torch.testing.assert_close(iteration(matrix.T.contiguous()).T, found, rtol=1e-3, atol=1e-4)
    batched = [matrix.clone() for matrix in matrices]
    replace(iteration, batched=True).apply_(batched)
    torch.testing.assert_close(batched, together, rtol=1e-3, atol=1e-4)


def test_with_coefficients_that_converge_it_is_the_polar_factor() -> None:
    matrix = with_values(torch.linspace(0.2, 1, 12), 12, 20)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = NewtonSchulz(20, CONVERGING, "fp32")(matrix)
    torch.testing.assert_close(found, left @ right, rtol=1e-4, atol=1e-4)


def test_a_matrix_of_zeros_stays_one() -> None:
    assert torch.equal(NewtonSchulz()(torch.zeros(3, 5)), torch.zeros(3, 5))
