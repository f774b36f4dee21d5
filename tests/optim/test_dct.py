"""The cosine basis: orthonormal, one orientation by product and FFT, its best columns."""

from __future__ import annotations

from itertools import combinations
from typing import Literal

import pytest
import torch

from modicum.optim.dct import DCTProjector, Transform, _twiddles, dct, dct_basis
from modicum.optim.selections import PLACES
from modicum.proofs.contracts.optim.subjects import numbers

CPU = torch.device("cpu")
TRANSFORMS: tuple[Transform, ...] = ("fft", "product")


@pytest.mark.parametrize("width", [1, 2, 5, 8, 33, 256])
def test_the_basis_is_orthonormal_and_made_once(width: int) -> None:
    basis = dct_basis(width, CPU)
    assert dct_basis(width, CPU) is basis
    for product in (basis @ basis.T, basis.T @ basis):
        torch.testing.assert_close(product, torch.eye(width), rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 16, 31, 255, 256])
def test_the_transform_is_the_product_and_scipys(width: int) -> None:
    matrix = numbers(7, width)
    product = matrix @ dct_basis(width, CPU).T
    torch.testing.assert_close(dct(matrix), product, rtol=0, atol=1e-5)
    fft = pytest.importorskip("scipy.fft")
    theirs = torch.from_numpy(fft.dct(matrix.double().numpy(), type=2, norm="ortho", axis=1))
    torch.testing.assert_close(product.double(), theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(dct(matrix).double(), theirs, rtol=0, atol=1e-5)


def test_a_default_device_changes_nothing() -> None:
    matrix, basis = numbers(7, 6), dct_basis(6, CPU)
    expected = dct(matrix)
    dct_basis.cache_clear()
    _twiddles.cache_clear()
    with torch.device("meta"):
        assert torch.equal(dct_basis(6, CPU), basis)
        assert torch.equal(dct(matrix), expected)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (7, 7), (40, 3)], ids=str)
def test_the_largest_columns_go_down_and_up_again(
    shape: tuple[int, int], transform: Transform
) -> None:
    projector, matrix = DCTProjector(3, transform=transform), numbers(*shape)
    bases, inside = projector.refresh(matrix, 0, 0)
    assert bases[PLACES].dtype == torch.int32
    assert tuple(inside.shape) == projector.inner(shape)
    torch.testing.assert_close(projector.down(matrix, bases), inside, rtol=0, atol=1e-5)
    outside = projector.outside(matrix, inside, bases)
    both = projector.up(inside, bases, shape) + outside
    torch.testing.assert_close(both, matrix, rtol=0, atol=1e-6)
    # The error is the energy of the columns that were not chosen.
    energy = matrix.square().sum() - inside.square().sum()
    torch.testing.assert_close(outside.square().sum(), energy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (7, 7)], ids=str)
def test_at_full_rank_it_gives_the_matrix_back(shape: tuple[int, int]) -> None:
    projector, matrix = DCTProjector(min(shape)), numbers(*shape)
    bases, inside = projector.refresh(matrix, 0, 0)
    back = projector.up(inside, bases, shape)
    torch.testing.assert_close(back, matrix, rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", [1, 2])
def test_no_other_columns_have_more(norm: Literal[1, 2]) -> None:
    matrix = numbers(5, 7)
    bases, _ = DCTProjector(3, norm).refresh(matrix.T.contiguous(), 0, 0)
    transformed = dct_basis(5, CPU) @ matrix
    score = transformed.abs().sum(1) if norm == 1 else transformed.square().sum(1)
    best = max(combinations(range(5), 3), key=lambda chosen: score[list(chosen)].sum().item())
    assert bases[PLACES].tolist() == list(best)


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (6, 6)], ids=str)
def test_moments_move_as_the_product_of_the_bases_says(shape: tuple[int, int]) -> None:
    projector = DCTProjector(4)
    old, moment = projector.refresh(numbers(*shape, name="old"), 0, 0)
    new, _ = projector.refresh(numbers(*shape, name="new"), 0, 0)
    basis = dct_basis(min(shape), CPU).double()
    turn = basis[old[PLACES]] @ basis[new[PLACES]].T
    assert 0 < turn.round().sum() < 4
    expected = moment.double() @ turn if shape[0] >= shape[1] else turn.T @ moment.double()
    turned = projector.turn(moment, old, new, squared=False)
    torch.testing.assert_close(turned.double(), expected, rtol=0, atol=1e-6)
    squares = projector.turn(moment.square(), old, new, squared=True)
    assert squares.min() >= 0
    assert torch.equal(squares, turned.square())


def test_what_fits() -> None:
    projector = DCTProjector(3, largest=50)
    shapes = ((3, 9), (2, 9), (9,), (3, 50), (49, 49))
    assert [projector.fits(shape) for shape in shapes] == [True, False, False, False, True]
