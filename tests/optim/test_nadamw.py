"""NAdamW: optax's rule, written out here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.optim import NAdamW
from modicum.proofs.contracts.optim.subjects import numbers


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str
)
def test_twenty_steps_are_those_of_optax(dtype: torch.dtype, near: float) -> None:
    rate, (b1, b2), epsilon, decay = 0.01, (0.9, 0.95), 1e-6, 0.3
    weight = nn.Parameter(0.1 * numbers(13, 7).to(dtype))
    optimizer = NAdamW([weight], lr=rate, betas=(b1, b2), epsilon=epsilon, weight_decay=decay)
    expected = weight.detach().clone().double()
    mean, square = torch.zeros(13, 7).double(), torch.zeros(13, 7).double()
    for step in range(1, 21):
        gradient = numbers(13, 7, name=f"{step}").to(dtype)
        weight.grad = gradient.clone()
        optimizer.step()
        # optax: scale_by_adam(nesterov=True), add_decayed_weights, scale_by_learning_rate
        wide = gradient.double()
        mean = b1 * mean + (1 - b1) * wide
        square = b2 * square + (1 - b2) * wide**2
        ahead = b1 * (mean / (1 - b1 ** (step + 1))) + (1 - b1) * (wide / (1 - b1**step))
        update = ahead / ((square / (1 - b2**step)).sqrt() + epsilon)
        expected = expected - rate * (update + decay * expected)
    assert (weight.double() - expected).abs().max() < near
    assert optimizer.state[weight]["exp_avg"].dtype == dtype


def test_it_is_not_pytorchs_nadam() -> None:
    ours, theirs = (nn.Parameter(numbers(5, 3)) for _ in range(2))
    pair = (
        NAdamW([ours], lr=0.02, betas=(0.9, 0.95)),
        torch.optim.NAdam([theirs], lr=0.02, betas=(0.9, 0.95)),
    )
    for step in range(3):
        for weight, optimizer in zip((ours, theirs), pair, strict=True):
            weight.grad = numbers(5, 3, name=f"{step}")
            optimizer.step()
    assert (ours - theirs).abs().max() > 1e-3
