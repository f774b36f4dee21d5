"""Scion: its equations with both kinds of factors, signs of zero, half of AdamW's state."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.parameters import trained_shapes
from modicum.optim import AdamW, Scion
from modicum.proofs.contracts.optim.subjects import llama, numbers

SHAPES = ((24, 16), (16, 24), (9,), (3, 2, 4))


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of Newton-Schulz, as its authors wrote them."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    x = x.T if len(matrix) > len(matrix.T) else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if len(matrix) > len(matrix.T) else x


@pytest.mark.parametrize("factors", ["sweep", "paper"])
def test_twenty_steps_are_the_papers(factors: Literal["sweep", "paper"]) -> None:
    rate, mu, beta, decay = 0.02, 0.9, 0.95, 0.3
    weights = [nn.Parameter(0.1 * numbers(*shape)) for shape in SHAPES]
    optimizer = Scion(
        weights, lr=rate, momentum=mu, sign_beta=beta, factors=factors, sign_rate=0.3,
        matrix_radius=2.0, sign_radius=5.0, weight_decay=decay,
    )  # fmt: skip
    expected = [weight.detach().clone() for weight in weights]
    moments = [torch.zeros_like(weight) for weight in expected]
    for step in range(20):
        for place, weight in enumerate(weights):
            gradient = numbers(*weight.shape, name=f"{step}")
            weight.grad = gradient.clone()
            keep = mu if weight.ndim == 2 else beta
            moments[place] = keep * moments[place] + (1 - keep) * gradient
            if weight.ndim == 2:
                rows, columns = weight.shape
                size = math.sqrt(max(1, rows / columns))
                if factors == "paper":
                    size = 2.0 * math.sqrt(rows / columns)
                update = size * orthogonal(moments[place])
            else:
                inputs = math.prod(weight.shape[1:])
                size = 0.3 if factors == "sweep" else 5.0 / inputs
                update = size * moments[place].sign()
            expected[place] = (1 - rate * decay) * expected[place] - rate * update
        optimizer.step()
    for weight, other in zip(weights, expected, strict=True):
        assert (weight - other).abs().max() < 1e-5


def test_what_has_no_gradient_does_not_move() -> None:
    table = nn.Parameter(torch.ones(3, 2))
    optimizer = Scion([{"params": [table], "matrix": False}], lr=0.1, sign_rate=0.5)
    table.grad = torch.tensor([[1.0, -1.0], [0.0, 0.0], [2.0, 0.0]])
    optimizer.step()
    expected = torch.tensor([[0.95, 1.05], [1.0, 1.0], [0.95, 1.0]])
    torch.testing.assert_close(table.detach(), expected)


def test_with_decay_one_the_papers_weights_stay_in_their_balls() -> None:
    weight = nn.Parameter(0.01 * numbers(16, 24))
    optimizer = Scion([weight], lr=0.2, factors="paper", matrix_radius=2.0, weight_decay=1.0)
    for step in range(30):
        weight.grad = numbers(16, 24, name=f"{step}") + 1.0
        optimizer.step()
    radius = 2.0 * math.sqrt(16 / 24)
    # Newton-Schulz' five steps leave singular values of at most 1.14.
    assert torch.linalg.matrix_norm(weight.detach(), 2) <= 1.14 * radius


def test_state_is_half_of_adamws_moments() -> None:
    at = OptimizerQuery(trained_shapes(llama()))
    counters = 4 * len(at.parameters)
    ours, adam = (m.value().ledger(at).bytes("optimizer") - counters for m in (Scion, AdamW))
    assert 2 * ours == adam
