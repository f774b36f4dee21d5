"""GaLore against plain momentum and Adam; its subspaces and what is kept of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.optim import GaLore, projectors
from modicum.optim.rules import Momentum
from modicum.proofs.contracts.optim.subjects import numbers


def gradient(step: int, *shape: int) -> Tensor:
    return numbers(*shape, name=f"gradient {step}") + 0.3 * numbers(*shape, name="drift")


def run(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        weight.grad = gradient(step, *weight.shape)
        optimizer.step()
        weight.grad = None


def trained(*shape: int, steps: int, **fields: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """How far a matrix went, and the state."""
    weight = nn.Parameter(numbers(*shape))
    optimizer = GaLore([weight], **fields)
    run(optimizer, weight, steps)
    return weight.detach() - numbers(*shape), optimizer.state[weight]


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (5, 5)], ids=str)
def test_momentum_at_full_rank_is_plain_momentum(shape: tuple[int, int]) -> None:
    one, other = (nn.Parameter(numbers(*shape)) for _ in range(2))
    ours = GaLore([one], lr=0.1, rank=5, scale=1.0, update_gap=100)
    ours.parts = replace(ours.parts, inner=Momentum(0.9))
    run(ours, one, 20)
    run(torch.optim.SGD([other], lr=0.1, momentum=0.9), other, 20)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


def test_at_full_rank_it_is_adam_in_a_turned_basis_and_of_vectors_plain_adam() -> None:
    weight, vector, one, other = (nn.Parameter(numbers(8, 5)[:n]) for n in (8, 1, 8, 1))
    adam = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0}
    ours = GaLore([weight, vector], **adam, epsilon=1e-12, rank=5, scale=1.0, update_gap=100)
    theirs = torch.optim.AdamW([one, other], **adam, eps=1e-12)
    for step in range(20):
        weight.grad, vector.grad = gradient(step, 8, 5), gradient(step, 1, 5)
        ours.step()
        basis = ours.state[weight]["right"]
        if step == 0:
            one.data = numbers(8, 5) @ basis.T
        one.grad, other.grad = gradient(step, 8, 5) @ basis.T, gradient(step, 1, 5)
        theirs.step()
    torch.testing.assert_close(weight.detach() @ basis.T, one.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(vector, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)], ids=str)
def test_to_the_bit_it_is_projection_adam_and_projection_back(shape: tuple[int, int]) -> None:
    weight = nn.Parameter(numbers(*shape))
    optimizer = GaLore([weight], lr=0.05, rank=5, update_gap=3, weight_decay=0.1)
    tall = shape[0] >= shape[1]
    theirs, mean, square = weight.detach().clone(), torch.zeros(()), torch.zeros(())
    for step in range(8):
        full = gradient(step, *shape)
        if step % 3 == 0:
            left, _, right = torch.linalg.svd(full, full_matrices=False)
            basis = right[:5].contiguous() if tall else left[:, :5].contiguous()
        low = full @ basis.T if tall else basis.T @ full
        if step == 0:
            mean, square = torch.zeros_like(low), torch.zeros_like(low)
        mean.mul_(0.9).add_(low, alpha=1 - 0.9)
        square.mul_(0.999).addcmul_(low, low, value=1 - 0.999)
        size = (1 - 0.999 ** (step + 1)) ** 0.5 / (1 - 0.9 ** (step + 1))
        direction = mean / (square.sqrt() + 1e-6)
        back = direction @ basis if tall else basis @ direction
        theirs = theirs - back * (size * 0.25) * 0.05
        theirs = theirs * (1 - 0.05 * 0.1)
        weight.grad = full
        optimizer.step()
    assert torch.equal(weight, theirs)


def test_alpha_and_the_learning_rate_enter_as_a_product() -> None:
    one, same, twice = (
        trained(9, 6, steps=3, lr=rate, scale=scale, rank=2)[0]
        for rate, scale in ((0.02, 0.25), (0.01, 0.5), (0.02, 0.5))
    )
    torch.testing.assert_close(same, one, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(twice, 2 * one, rtol=1e-4, atol=1e-6)


def test_an_update_has_the_rank_and_two_subspaces_have_twice_it() -> None:
    went = [trained(20, 16, steps=steps, rank=3, update_gap=2)[0] for steps in range(5)]
    updates = torch.stack([after - before for before, after in pairwise(went)])
    assert torch.linalg.matrix_rank(updates, rtol=1e-4).tolist() == [3, 3, 3, 3]
    assert int(torch.linalg.matrix_rank(went[4], rtol=1e-4)) == 6


@pytest.mark.parametrize(
    ("stagger", "expected"), [(False, [[0, 6]] * 3), (True, [[0, 6], [0, 4], [0, 2, 8]])]
)
def test_refreshes_come_every_so_many_steps(stagger: bool, expected: list[list[int]]) -> None:
    weights, found = [nn.Parameter(numbers(9, 6)) for _ in range(3)], [[], [], []]
    optimizer = GaLore(weights, rank=2, update_gap=6, stagger=stagger)
    for step in range(10):
        for steps, weight in zip(found, weights, strict=True):
            before = optimizer.state[weight].get("right", torch.zeros(0)).clone()
            run(optimizer, weight, 1, first=step)
            steps += [] if torch.equal(optimizer.state[weight]["right"], before) else [step]
    assert found == expected


def test_what_becomes_of_moments_when_the_subspace_changes() -> None:
    def after(way: str, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
        return trained(9, 6, steps=steps, lr=1.0, rank=2, update_gap=3, on_refresh=way)

    (before, old), (_, kept), (_, turned) = after("keep", 3), after("keep", 4), after("rotate", 4)
    went, reset = after("reset", 4)
    low, turn = gradient(3, 9, 6) @ kept["right"].T, old["right"] @ kept["right"].T
    torch.testing.assert_close(kept["exp_avg"], 0.9 * old["exp_avg"] + 0.1 * low)
    torch.testing.assert_close(turned["exp_avg"], 0.9 * old["exp_avg"] @ turn + 0.1 * low)
    torch.testing.assert_close(reset["exp_avg"], 0.1 * low)
    # The bias of young moments is corrected anew: a first step of Adam has length one everywhere.
    inside = (went - before) @ reset["right"].T / GaLore.value().scale
    torch.testing.assert_close(inside.abs(), torch.ones(9, 2), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fields", [{}, {"stagger": True}, {"svd": "randomized"}], ids=str)
def test_of_a_first_gradient_of_zeros_no_subspace_is_kept(fields: dict[str, Any]) -> None:
    late, fresh = (nn.Parameter(numbers(9, 6)) for _ in range(2))
    ours, other = (GaLore([w], rank=2, update_gap=50, **fields) for w in (late, fresh))
    for _ in range(2):
        late.grad = torch.zeros(9, 6)
        ours.step()
    assert torch.equal(late, numbers(9, 6))
    run(ours, late, 3)
    run(other, fresh, 3)
    assert torch.equal(late, fresh)
    assert torch.equal(ours.state[late]["right"], other.state[fresh]["right"])


def test_of_gradients_that_stay_zero_one_subspace_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found, svd = [], projectors.truncated_svd

    def counted(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        found.append(rank)
        return svd(matrix, rank)

    monkeypatch.setattr(projectors, "truncated_svd", counted)
    weight = nn.Parameter(numbers(9, 6))
    optimizer = GaLore([weight], rank=2, update_gap=50)
    for _ in range(4):
        weight.grad = torch.zeros(9, 6)
        optimizer.step()
    assert len(found) == 1
    run(optimizer, weight, 3)
    assert len(found) == 2
