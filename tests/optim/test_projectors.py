"""Projectors: orthonormal bases of the leading subspaces, and what they do to matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modicum.core.random import normal_
from modicum.optim.projectors import ProjectedSide, SVDProjector

SIDES: tuple[ProjectedSide, ...] = ("std", "reverse_std", "left", "right", "full")
SHAPES = ((9, 6), (6, 9), (7, 7), (3, 40))


def numbers(*shape: int, name: str = "matrix") -> Tensor:
    return normal_(torch.empty(shape), seed=0, name=name)


@pytest.mark.parametrize("method", ["exact", "randomized"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_matrix_of_the_rank_goes_down_and_comes_up_again(
    shape: tuple[int, int], side: ProjectedSide, method: str
) -> None:
    projector = SVDProjector(3, side, method)
    matrix = numbers(shape[0], 3, name="one") @ numbers(3, shape[1], name="other")
    bases, found = projector.refresh(matrix, step=0, place=0)
    assert {n: tuple(b.shape) for n, b in bases.items()} == {
        name: kept.shape for name, kept in projector.bases(shape).items()
    }
    for basis in bases.values():
        short = basis if basis.shape[0] == 3 else basis.T
        torch.testing.assert_close(short @ short.T, torch.eye(3), rtol=0, atol=1e-5)
        assert basis.is_contiguous()
    inside = projector.down(matrix, bases)
    assert torch.equal(inside, found)
    assert tuple(inside.shape) == projector.inner(shape)
    torch.testing.assert_close(projector.up(inside, bases, shape), matrix, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "side", "expected"),
    [
        ((9, 6), "std", ["right"]),
        ((6, 9), "std", ["left"]),
        ((6, 6), "std", ["right"]),
        ((9, 6), "reverse_std", ["left"]),
        ((6, 9), "reverse_std", ["right"]),
        ((9, 6), "full", ["left", "right"]),
    ],
)
def test_sides_are_the_authors(
    shape: tuple[int, int], side: ProjectedSide, expected: list[str]
) -> None:
    assert list(SVDProjector(2, side).bases(shape)) == expected


def test_the_subspace_is_that_of_the_largest_singular_values() -> None:
    left, _, right = torch.linalg.svd(numbers(12, 8), full_matrices=False)
    matrix = left @ torch.diag(0.5 ** torch.arange(8.0)) @ right
    exact = SVDProjector(3).refresh(matrix, 0, 0)[0]["right"]
    torch.testing.assert_close((exact @ right[:3].T).abs(), torch.eye(3), rtol=0, atol=1e-5)
    nearly = SVDProjector(3, method="randomized").refresh(matrix, 0, 0)[0]["right"]
    torch.testing.assert_close(nearly.T @ nearly, exact.T @ exact, rtol=0, atol=1e-4)


def test_the_randomized_basis_is_a_function_of_seed_step_and_place() -> None:
    matrix = numbers(40, 30)

    def found(seed: int = 0, step: int = 0, place: int = 0) -> Tensor:
        return SVDProjector(2, method="randomized", seed=seed).refresh(matrix, step, place)[0][
            "right"
        ]

    first = found()
    torch.manual_seed(1)
    assert torch.equal(found(), first)
    assert not any(torch.equal(other, first) for other in (found(1), found(0, 1), found(0, 0, 1)))


def test_bases_in_bf16_are_orthonormal_to_their_precision() -> None:
    basis = SVDProjector(4, bits=16).refresh(numbers(30, 20), 0, 0)[0]["right"]
    assert basis.dtype == torch.bfloat16
    torch.testing.assert_close(basis.float() @ basis.float().T, torch.eye(4), rtol=0, atol=1e-2)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_turned_moment_is_that_of_the_new_basis(
    shape: tuple[int, int], side: ProjectedSide
) -> None:
    projector = SVDProjector(3, side)
    old = projector.refresh(numbers(*shape, name="old"), 0, 0)[0]
    new = projector.refresh(numbers(*shape, name="new"), 0, 0)[0]
    moment = projector.down(numbers(*shape), old)
    turned = projector.turn(moment, old, new, squared=False)
    expected = projector.down(projector.up(moment, old, shape), new)
    torch.testing.assert_close(turned, expected, rtol=1e-4, atol=1e-5)
    # A change of signs changes no square; and squares stay positive.
    flipped = {name: -basis for name, basis in old.items()}
    squares = moment.square()
    same = projector.turn(squares, old, flipped, squared=True)
    torch.testing.assert_close(same, squares, rtol=1e-4, atol=1e-5)
    assert projector.turn(squares, old, new, squared=True).min() >= 0


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inside_and_outside_are_the_matrix(shape: tuple[int, int], side: ProjectedSide) -> None:
    projector, matrix = SVDProjector(2, side, "random"), numbers(*shape)
    bases, inside = projector.refresh(matrix, 0, 0)
    outside = projector.outside(matrix, inside, bases)
    both = projector.up(inside, bases, shape) + outside
    torch.testing.assert_close(both, matrix, rtol=0, atol=1e-6)
    # What is outside has nothing inside.
    assert projector.down(outside, bases).abs().max() < 1e-5


def test_random_vectors_are_drawn_and_a_share_is_of_the_smaller_dimension() -> None:
    projector = SVDProjector(1, method="random", share=0.4)
    one, other = (projector.refresh(numbers(9, 6, name=n), 0, 0)[0]["right"] for n in "ab")
    assert torch.equal(one, other)
    assert one.shape == (2, 6)
    assert not torch.equal(one, projector.refresh(numbers(9, 6), 1, 0)[0]["right"])
    assert SVDProjector(1, share=1.0).ranks((9, 6)) == 6
    assert SVDProjector(1, share=0.01).ranks((9, 6)) == 1


@pytest.mark.parametrize(
    ("shape", "fits"), [((3, 9), True), ((2, 9), False), ((9,), False), ((3, 3, 3), False)]
)
def test_what_fits(shape: tuple[int, ...], fits: bool) -> None:
    assert SVDProjector(3).fits(shape) is fits
