"""Kron: the peer's equations in float64, what factors converge to, its schedule, bytes, faults."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.core.errors import InputError
from modicum.core.random import normal_
from modicum.optim import AdamW, Kron
from modicum.optim.kron import WhitenedMomentum, fit, largest_eigenvalue
from modicum.proofs.contracts.optim.subjects import numbers

MOMENTUM, FACTOR_RATE = 0.9, 0.1


def largest(a: Tensor) -> Tensor:
    """The bound on the spectral norm, as `pytorch_optimizer` computes it."""
    most = a.abs().max()
    a = a / most
    (value0, i), (value1, j) = (a * a).sum(0).max(0), (a * a).sum(1).max(0)
    if value0 > value1:
        x = a[:, i] @ a
        return most * ((x / x.norm()) @ a.T).norm()
    x = a @ a[j]
    return most * (a.T @ (x / x.norm())).norm()


class Loop:
    """Kron of one full matrix as `pytorch_optimizer` has it, in float64, without balancing."""

    def __init__(self, weight: Tensor, *, normalized: bool) -> None:
        self.weight, self.normalized, self.steps = weight.double().clone(), normalized, 0
        self.mean = torch.zeros_like(self.weight)
        self.left, self.right = (torch.eye(side).double() for side in weight.shape)

    def step(self, gradient: Tensor, rate: float, decay: float) -> None:
        self.steps += 1
        g = gradient.double()
        if self.normalized:
            g = g / g.norm()
        self.mean = MOMENTUM * self.mean + (1 - MOMENTUM) * g
        mean = self.mean / (1 - MOMENTUM**self.steps)
        v = torch.empty(gradient.shape, dtype=torch.float64)
        normal_(v, seed=3, name="kron/0", step=self.steps)
        a = self.left @ mean @ self.right.T
        b = torch.linalg.inv(self.left).T @ v @ torch.linalg.inv(self.right)
        for name, one, two in (("left", a @ a.T, b @ b.T), ("right", a.T @ a, b.T @ b)):
            q = getattr(self, name)
            setattr(self, name, q - FACTOR_RATE * torch.triu(one - two) / largest(one + two) @ q)
        u = self.left.T @ self.left @ mean @ self.right.T @ self.right
        u = u * min(1.0, 1.1 / (u.square().mean().sqrt().item() + 1e-6))
        self.weight = self.weight - rate * (u + decay * self.weight)


def gradient(step: int, *shape: int) -> Tensor:
    """Numbers whose rows are of different sizes."""
    return numbers(*shape, name=f"{step}") * torch.linspace(0.2, 2.0, shape[0])[:, None]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("shape", [(12, 12), (9, 14)])
def test_it_is_the_peers_loop_in_float64(shape: tuple[int, int], normalized: bool) -> None:
    rule = WhitenedMomentum(MOMENTUM, FACTOR_RATE, 100, 0.0, 0.0, normalized, 256, seed=3)
    kept = {name: torch.zeros(one.shape).double() for name, one in rule.state(shape).items()}
    ours = numbers(*shape).double()
    loop = Loop(ours, normalized=normalized)
    for step in range(20):
        g = gradient(step, *shape).double()
        direction, factor = rule.direction(g, kept, step + 1)
        ours -= 0.01 * factor * direction
        loop.step(g, 0.01, 0.0)
    assert (ours - loop.weight).abs().max() < 1e-8
    # Balancing moves a factor from one side to the other.
    both = torch.kron(*(kept[f"{side}_triangle"].view(-1, n) for side, n in _sides(shape)))
    assert (both - torch.kron(loop.left, loop.right)).abs().max() < 1e-8


def _sides(shape: tuple[int, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("left", shape[0]), ("right", shape[1])


def test_twenty_steps_are_the_peers() -> None:
    weight = nn.Parameter(numbers(16, 24))
    optimizer = Kron(
        [weight], lr=0.01, momentum=MOMENTUM, factor_rate=FACTOR_RATE, normalized=False,
        weight_decay=0.1, seed=3,
    )  # fmt: skip
    loop = Loop(weight.detach(), normalized=False)
    for step in range(20):
        weight.grad = gradient(step, 16, 24)
        optimizer.step()
        loop.step(weight.grad, 0.01, 0.1)
    assert (weight - numbers(16, 24)).abs().max() > 0.05
    assert (weight - loop.weight).abs().max() < 1e-4


def test_factors_come_to_whiten_gradients() -> None:
    left, right = torch.eye(6).double(), torch.eye(4).double()
    turned = torch.linalg.qr(numbers(6, 6).double())[0]
    rows = turned @ torch.linspace(0.3, 3.0, 6).double().diag()
    columns = torch.linspace(0.5, 2.0, 4).double().diag()
    for n in range(600):
        g = rows @ numbers(6, 4, name=f"{n}").double() @ columns
        probe = numbers(6, 4, name=f"probe {n}").double()
        fit(left, right, g, probe, 0.2 if n < 300 else 0.03)
    assert left.tril(-1).count_nonzero() == right.tril(-1).count_nonzero() == 0
    # Directions Q_L^T Q_L G Q_R^T Q_R are of one size and uncorrelated, where gradients are not.
    sizes = torch.linalg.svdvals(torch.kron(left.T @ left @ rows, columns @ right.T @ right))
    before = torch.linalg.svdvals(torch.kron(rows, columns))
    assert before[0] / before[-1] == pytest.approx(40)
    assert sizes[0] / sizes[-1] < 2
    assert sizes.mean() == pytest.approx(1, abs=0.2)
    # The largest entries are alike on both sides.
    torch.testing.assert_close(left.abs().max(), right.abs().max())


def test_the_bound_is_within_a_root_of_two_of_the_largest_eigenvalue() -> None:
    for seed in range(20):
        matrix = numbers(15, 9, name=f"{seed}")
        gram = matrix @ matrix.T
        share = largest_eigenvalue(gram) / torch.linalg.eigvalsh(gram)[-1]
        assert 1 / math.sqrt(2) < share <= 1 + 1e-5
    assert 0 < largest_eigenvalue(torch.zeros(3, 3)) < 1e-30


def test_factors_are_fitted_ever_less_often() -> None:
    rule = WhitenedMomentum(0.9, 0.1, 50, 0.01, 0.1, True, 256)
    fitted = [rule.fits_in(age) for age in range(1, 4001)]
    assert all(fitted[:51])
    assert sum(math.exp(-0.01 * n) for n in range(100)) == pytest.approx(
        sum(fitted[50:150]), abs=12
    )
    late = sum(fitted[400:]) / 3600
    assert late == pytest.approx(0.1, abs=0.02)
    other = WhitenedMomentum(0.9, 0.1, 50, 0.01, 0.1, True, 256, seed=1)
    assert fitted != [other.fits_in(age) for age in range(1, 4001)]


def test_between_fits_factors_stay() -> None:
    weight = nn.Parameter(numbers(6, 4))
    optimizer = Kron([weight], flat_steps=0, probability_decay=100.0, least_probability=0.0)
    found = []
    for step in range(3):
        weight.grad = gradient(step, 6, 4)
        optimizer.step()
        found.append(optimizer.state[weight]["left_triangle"].clone())
    # With none left, the first step alone has a probability.
    assert not torch.equal(found[0].view(6, 6), torch.eye(6))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


def test_matrices_and_blocks_have_probes_of_their_own() -> None:
    weights = [nn.Parameter(torch.zeros(8, 4)) for _ in range(2)]
    optimizer = Kron(weights, block_size=4)
    for weight in weights:
        weight.grad = gradient(0, 4, 4).repeat(2, 1)
    optimizer.step()
    blocks = [block for w in weights for block in optimizer.state[w]["left_triangle"].split(16)]
    assert len({tuple(block.tolist()) for block in blocks}) == 4


def test_a_matrix_without_a_gradient_so_far_stays_as_it_is() -> None:
    weight = nn.Parameter(numbers(6, 4))
    optimizer = Kron([weight], lr=0.1)
    for _ in range(3):
        weight.grad = torch.zeros(6, 4)
        optimizer.step()
    assert torch.equal(weight.detach(), numbers(6, 4))
    assert torch.equal(optimizer.state[weight]["left_triangle"].view(6, 6), torch.eye(6))


def test_state_is_a_moment_and_two_squares_a_block() -> None:
    at = OptimizerQuery((TrainedParameter("w", (600, 300), "matrix", 4),))
    squares = 6 * (200**2 + 150**2)
    assert Kron.value().ledger(at).bytes("optimizer") == 4 * (600 * 300 + squares) + 4
    square = OptimizerQuery((TrainedParameter("w", (256, 256), "matrix", 4),))
    ours, adam = (kind.value().ledger(square).bytes("optimizer") - 4 for kind in (Kron, AdamW))
    assert 2 * ours == 3 * adam


def test_what_cannot_be_is_refused() -> None:
    weight = nn.Parameter(numbers(6, 4))
    optimizer = Kron([weight])
    weight.grad = torch.full((6, 4), torch.inf)
    with pytest.raises(InputError, match="not finite"):
        optimizer.step()
    with pytest.raises(InputError, match="block_size"):
        Kron([weight], block_size=0)
    with pytest.raises(InputError, match="factor_rate"):
        Kron([weight], factor_rate=1.5)
