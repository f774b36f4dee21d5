"""SOAP: a float64 loop at frequency 1, the peer's equations, blocks, bytes, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.core.errors import InputError
from modicum.optim import SOAP, AdamW
from modicum.optim.soap import EigenbasisAdam, power_step
from modicum.proofs.contracts.optim.subjects import numbers

BETAS, FACTOR, EPSILON = (0.9, 0.95), 0.8, 1e-8


class Loop:
    """SOAP of one full matrix in float64, as its authors wrote it; with the peer's count or not."""

    def __init__(self, weight: Tensor, *, frequency: int = 1, as_peer: bool = False) -> None:
        self.weight, self.frequency = weight.double().clone(), frequency
        self.mean, self.square = (torch.zeros_like(self.weight) for _ in range(2))
        rows, columns = weight.shape
        self.factors = [torch.zeros(side, side).double() for side in (rows, columns)]
        self.bases: list[Tensor] = []
        self.count = int(as_peer) - 1

    def step(self, gradient: Tensor, rate: float) -> None:
        g = gradient.double()
        self.count += 1
        if self.bases:
            left, right = self.bases
            turned = torch.einsum("ij,ia,jb->ab", g, left, right)
            self.mean = BETAS[0] * self.mean + (1 - BETAS[0]) * g
            self.square = BETAS[1] * self.square + (1 - BETAS[1]) * turned**2
            direction = torch.einsum("ij,ia,jb->ab", self.mean, left, right)
            direction = direction / (self.square.sqrt() + EPSILON)
            direction = torch.einsum("ab,ia,jb->ij", direction, left, right)
            size = math.sqrt(1 - BETAS[1] ** self.count) / (1 - BETAS[0] ** self.count)
            self.weight -= rate * size * direction
        for one, outer in zip(self.factors, (g @ g.T, g.T @ g), strict=True):
            one.mul_(FACTOR).add_(outer, alpha=1 - FACTOR)
        if not self.bases:
            self.bases = [torch.linalg.eigh(one)[1].flip(1) for one in self.factors]
        if self.count > 0 and self.count % self.frequency == 0:
            for side in (0, 1):
                factor, basis = self.factors[side], self.bases[side]
                order = torch.argsort(torch.diag(basis.T @ factor @ basis), descending=True)
                self.square = self.square.index_select(side, order)
                self.bases[side] = torch.linalg.qr(factor @ basis[:, order])[0]


def gradient(step: int, *shape: int) -> Tensor:
    """Numbers of which some directions are larger than others, of full rank on both sides."""
    return numbers(*shape, name=f"{step}") * torch.linspace(0.2, 2.0, shape[0])[:, None]


def test_full_blocks_at_frequency_one_are_a_loop_in_float64() -> None:
    shape = (12, 12)
    rule = EigenbasisAdam(BETAS, FACTOR, 1, 256, EPSILON)
    kept = {name: torch.zeros(one.shape).double() for name, one in rule.state(shape).items()}
    ours = numbers(*shape).double()
    loop = Loop(ours)
    for step in range(20):
        g = gradient(step, *shape).double()
        direction, factor = rule.direction(g, kept, step + 1)
        ours -= 0.01 * factor * direction
        loop.step(g, 0.01)
    assert (ours - loop.weight).abs().max() < 1e-8
    assert (kept["left_basis"].view(12, 12) - loop.bases[0]).abs().max() < 1e-8


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("as_peer", [False, True])
def test_twenty_steps_are_the_authors_and_the_peers(frequency: int, as_peer: bool) -> None:
    weight = nn.Parameter(numbers(16, 16))
    optimizer = SOAP(
        [weight], lr=0.01, betas=BETAS, factor_beta=FACTOR, frequency=frequency,
        epsilon=EPSILON, counts_first=as_peer,
    )  # fmt: skip
    loop = Loop(weight.detach(), frequency=frequency, as_peer=as_peer)
    for step in range(20):
        weight.grad = gradient(step, 16, 16)
        optimizer.step()
        loop.step(weight.grad, 0.01)
    assert (weight - numbers(16, 16)).abs().max() > 0.05
    assert (weight - loop.weight).abs().max() < 1e-4


def test_blocks_are_matrices_of_their_own() -> None:
    full = nn.Parameter(numbers(20, 15))
    shared: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = SOAP([full], block_size=8, **shared)
    # Three pieces of at most seven rows, two of eight and seven columns.
    blocks = [
        nn.Parameter(part.clone())
        for over in full.detach().split(7)
        for part in over.split([8, 7], dim=1)
    ]
    alone = SOAP(blocks, **shared)
    for step in range(6):
        full.grad = gradient(step, 20, 15)
        pieces = [part for over in full.grad.split(7) for part in over.split([8, 7], dim=1)]
        for block, part in zip(blocks, pieces, strict=True):
            block.grad = part.clone()
        optimizer.step()
        alone.step()
    rows = [torch.cat(tuple(blocks[place : place + 2]), dim=1) for place in (0, 2, 4)]
    torch.testing.assert_close(full.detach(), torch.cat(rows).detach(), rtol=0, atol=1e-6)


def test_a_power_step_leads_to_the_eigenvectors() -> None:
    matrix = numbers(10, 10).double()
    factor = matrix @ torch.diag(2.0 ** torch.arange(10).double()) @ matrix.T
    basis = torch.linalg.qr(numbers(10, 10, name="start").double())[0]
    for _ in range(200):
        order = power_step(factor, basis)
    assert order.tolist() == list(range(10))
    turned = basis.T @ factor @ basis
    assert (turned - turned.diagonal().diag()).abs().max() < 1e-8 * turned.diagonal().max()
    assert torch.equal(turned.diagonal().argsort(descending=True), order)


def test_the_first_gradient_makes_no_update() -> None:
    weight = nn.Parameter(numbers(6, 4))
    optimizer = SOAP([weight], lr=0.1)
    weight.grad = gradient(0, 6, 4)
    optimizer.step()
    assert torch.equal(weight.detach(), numbers(6, 4))
    assert optimizer.state[weight]["left_factor"].norm() > 0


def test_a_matrix_without_a_gradient_so_far_stays_where_it_is() -> None:
    weight = nn.Parameter(numbers(6, 4))
    optimizer = SOAP([weight], lr=0.1)
    for _ in range(3):
        weight.grad = torch.zeros(6, 4)
        optimizer.step()
    assert torch.equal(weight.detach(), numbers(6, 4))


def test_state_is_moments_and_four_squares_a_block() -> None:
    at = OptimizerQuery((TrainedParameter("w", (600, 300), "matrix", 4),))
    # Three pieces of 200 rows, two of 150 columns.
    squares = 6 * 2 * (200**2 + 150**2)
    assert SOAP.value().ledger(at).bytes("optimizer") == 4 * (2 * 600 * 300 + squares) + 4
    square = OptimizerQuery((TrainedParameter("w", (256, 256), "matrix", 4),))
    ours, adam = (kind.value().ledger(square).bytes("optimizer") - 4 for kind in (SOAP, AdamW))
    assert ours == 3 * adam


def test_what_cannot_be_is_refused_before_anything_changes() -> None:
    weight = nn.Parameter(numbers(6, 4))
    optimizer = SOAP([weight], lr=0.1)
    weight.grad = torch.full((6, 4), torch.nan)
    with pytest.raises(InputError, match="not finite"):
        optimizer.step()
    assert int(optimizer.state[weight]["step"]) == 0
    with pytest.raises(InputError, match="frequency"):
        SOAP([weight], frequency=0)
    with pytest.raises(InputError, match="block_size"):
        SOAP([weight], block_size=0)
