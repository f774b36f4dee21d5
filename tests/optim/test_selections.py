"""Subspaces of coordinates, and choices of matrices: exact, drawn by seed, round and place."""

from __future__ import annotations

import pytest
import torch

from modicum.core.errors import InputError
from modicum.optim.selections import (
    PLACES,
    CoordinateProjector,
    SelectedKind,
    TensorChoice,
    TensorOrder,
    moved,
)
from modicum.proofs.contracts.optim.subjects import numbers

KINDS: tuple[SelectedKind, ...] = ("columns", "rows", "entries")
SHAPES = ((9, 6), (6, 9), (1, 5), (5, 1), (7, 40))


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inside_and_outside_are_the_matrix_to_the_bit(
    shape: tuple[int, int], kind: SelectedKind, share: float
) -> None:
    projector, matrix = CoordinateProjector(share, kind), numbers(*shape)
    bases, inside = projector.refresh(matrix, step=3, place=2)
    kept = projector.bases(shape)[PLACES]
    every = {"columns": shape[1], "rows": shape[0], "entries": shape[0] * shape[1]}[kind]
    assert kept.shape == bases[PLACES].shape == (max(1, round(share * every)),)
    assert bases[PLACES].dtype == kept.dtype == torch.int32
    assert tuple(inside.shape) == projector.inner(shape)
    assert torch.equal(projector.down(matrix, bases), inside)
    up, outside = projector.up(inside, bases, shape), projector.outside(matrix, inside, bases)
    assert torch.equal(up + outside, matrix)
    assert not (up * outside).any()
    assert int((up != 0).sum()) == inside.numel()


def test_places_are_a_function_of_seed_step_and_place() -> None:
    def drawn(seed: int = 0, step: int = 0, place: int = 0) -> list[int]:
        projector = CoordinateProjector(0.25, "columns", seed)
        found: list[int] = projector.refresh(numbers(2, 64), step, place)[0][PLACES].tolist()
        return found

    first = drawn()
    torch.manual_seed(5)
    assert drawn() == first == sorted(set(first))
    assert first not in (drawn(1), drawn(0, 1), drawn(0, 0, 1))


@pytest.mark.parametrize("dim", [0, 1])
def test_moving_places_is_the_product_with_a_partial_permutation(dim: int) -> None:
    old, new = torch.tensor([1, 4, 5, 9]), torch.tensor([0, 4, 9, 11])
    turn = (old[:, None] == new[None, :]).float()
    assert turn.sum() == 2
    values = numbers(4, 7).movedim(0, dim)
    expected = (turn.T @ values.movedim(dim, 0)).movedim(0, dim)
    assert torch.equal(moved(values, old, new, dim), expected)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("ascending", [{0, 1}, {2, 3}, {4, 0}, {1, 2}]),
        ("descending", [{4, 3}, {2, 1}, {0, 4}, {3, 2}]),
        ("mirror", [{0, 4}, {1, 3}, {2, 0}, {4, 1}]),
    ],
)
def test_matrices_take_turns_in_their_order(order: TensorOrder, expected: list[set[int]]) -> None:
    choice = TensorChoice(0.4, order)
    assert [choice.active(5, round_) for round_ in range(4)] == expected
    assert choice.rounds(5) == 5
    assert choice.active(5, 5) == expected[0]


def test_drawn_matrices_are_a_function_of_seed_and_round() -> None:
    one, other = TensorChoice(0.5, "random"), TensorChoice(0.5, "random", seed=1)
    rounds = [one.active(12, round_) for round_ in range(6)]
    assert rounds == [TensorChoice(0.5, "random").active(12, round_) for round_ in range(6)]
    assert len(set(rounds)) > 1
    assert rounds != [other.active(12, round_) for round_ in range(6)]
    assert {len(active) for active in rounds} == {6}
    assert one.rounds(12) is None


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize(("share", "count"), [(0.25, 8), (0.25, 12), (0.5, 6), (0.2, 10)])
def test_in_one_over_rho_rounds_every_matrix_has_been_active(
    order: TensorOrder, share: float, count: int
) -> None:
    choice = TensorChoice(share, order)
    seen = [choice.active(count, round_) for round_ in range(round(1 / share))]
    assert frozenset().union(*seen) == set(range(count))


def test_a_share_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(InputError, match="less than half of one"):
        TensorChoice(0.1).number(4)
    assert TensorChoice(0.0).number(4) == 0
    assert TensorChoice(0.0).active(4, 3) == frozenset()
