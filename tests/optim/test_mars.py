"""MARS: the authors' equations with either norm, and what is refused."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.optim import MARS
from modicum.proofs.contracts.optim.subjects import numbers

SHAPES = ((13, 7), (5,), (2, 3, 4))


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str
)
@pytest.mark.parametrize("clip", ["tensor", "all", "none"])
def test_twenty_steps_are_those_of_the_authors(
    clip: Literal["tensor", "all", "none"], dtype: torch.dtype, near: float
) -> None:
    rate, (b1, b2), gamma, epsilon, decay = 0.01, (0.95, 0.99), 0.025, 1e-6, 0.3
    weights = [nn.Parameter(0.1 * numbers(*shape).to(dtype)) for shape in SHAPES]
    optimizer = MARS(
        weights, lr=rate, betas=(b1, b2), gamma=gamma, clip=clip, epsilon=epsilon,
        weight_decay=decay,
    )  # fmt: skip
    expected = [weight.detach().clone().double() for weight in weights]
    means, squares, last = ([torch.zeros_like(w) for w in expected] for _ in range(3))
    norms = []
    for step in range(1, 21):
        # Large ones now and then, so that some are clipped and some are not.
        scale = 0.01 if step % 3 else 1.0
        for weight in weights:
            weight.grad = scale * numbers(*weight.shape, name=f"{step}").to(dtype)
        wide = [weight.grad.double() for weight in weights if weight.grad is not None]
        optimizer.step()
        changed = [g + gamma * b1 / (1 - b1) * (g - b) for g, b in zip(wide, last, strict=True)]
        all_of = torch.cat([c.flatten() for c in changed]).norm()
        for place, c in enumerate(changed):
            norm = all_of if clip == "all" else c.norm()
            norms.append(norm.item())
            if clip != "none" and norm > 1:
                c = c / norm
            means[place] = b1 * means[place] + (1 - b1) * c
            squares[place] = b2 * squares[place] + (1 - b2) * c**2
            root = (squares[place] / (1 - b2**step)).sqrt() + epsilon
            update = means[place] / (1 - b1**step) / root
            expected[place] = expected[place] * (1 - rate * decay) - rate * update
        last = wide
    assert min(norms) < 1 < max(norms)
    for weight, other in zip(weights, expected, strict=True):
        assert (weight.double() - other).abs().max() < near


def test_without_gamma_and_clip_it_is_adamw() -> None:
    ours, theirs = (nn.Parameter(numbers(13, 7)) for _ in range(2))
    fields = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.3}
    pair = (
        MARS([ours], gamma=0.0, clip="none", **fields),
        torch.optim.AdamW([theirs], **fields),
    )
    for step in range(20):
        for weight, optimizer in zip((ours, theirs), pair, strict=True):
            weight.grad = numbers(13, 7, name=f"{step}")
            optimizer.step()
    assert (ours - theirs).abs().max() < 1e-6


def test_a_norm_of_all_and_the_backward_pass_exclude_each_other() -> None:
    with pytest.raises(InputError, match="set clip to tensor"):
        MARS([nn.Parameter(torch.ones(3))], clip="all", in_backward=True)
