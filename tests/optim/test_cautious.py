"""Cautious AdamW: the authors' equations, and AdamW where all agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.optim import Cautious
from modicum.proofs.contracts.optim.subjects import numbers


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str
)
def test_twenty_steps_are_those_of_the_authors(dtype: torch.dtype, near: float) -> None:
    rate, (b1, b2), epsilon, decay = 0.01, (0.9, 0.95), 1e-6, 0.3
    weight = nn.Parameter(0.1 * numbers(13, 7).to(dtype))
    optimizer = Cautious([weight], lr=rate, betas=(b1, b2), epsilon=epsilon, weight_decay=decay)
    expected = weight.detach().clone().double()
    mean, square = torch.zeros(13, 7).double(), torch.zeros(13, 7).double()
    for step in range(1, 21):
        gradient = numbers(13, 7, name=f"{step}").to(dtype)
        weight.grad = gradient.clone()
        optimizer.step()
        wide = gradient.double()
        mean = b1 * mean + (1 - b1) * wide
        square = b2 * square + (1 - b2) * wide**2
        update = (mean / (1 - b1**step)) / ((square / (1 - b2**step)).sqrt() + epsilon)
        mask = (mean * wide > 0).double()
        assert step == 1 or 0.3 < mask.mean() < 0.95
        update = update * mask / mask.mean().clamp(min=1e-3)
        expected = expected * (1 - rate * decay) - rate * update
    assert (weight.double() - expected).abs().max() < near


def test_where_all_agree_it_is_adamw() -> None:
    ours, theirs = (nn.Parameter(numbers(13, 7)) for _ in range(2))
    fields = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.3}
    pair = Cautious([ours], **fields), torch.optim.AdamW([theirs], **fields)
    for step in range(20):
        for weight, optimizer in zip((ours, theirs), pair, strict=True):
            weight.grad = numbers(13, 7, name=f"{step}").abs()
            optimizer.step()
    assert (ours - theirs).abs().max() < 1e-6


def test_where_none_agree_nothing_moves_and_nothing_is_no_number() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Cautious([weight], lr=0.1)
    for gradient in (1.0, -1e-6, 0.0):
        weight.grad = torch.full((3,), gradient)
        optimizer.step()
    assert torch.allclose(weight, torch.full((3,), 0.9))
