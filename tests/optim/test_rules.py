"""Rules alone, against PyTorch's optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.optim.rules import Adam, AveragedMomentum, EpsilonPlace, Momentum
from modicum.proofs.contracts.optim.subjects import numbers


def stepped(place: EpsilonPlace, epsilon: float) -> float:
    """How far twenty steps of the rule end from those of `torch.optim.AdamW`."""
    rule, rate, decay = Adam((0.8, 0.98), epsilon, place), 0.05, 0.1
    theirs = nn.Parameter(numbers(13, 7, name="weight"))
    ours = theirs.detach().clone()
    optimizer = torch.optim.AdamW(
        [theirs], lr=rate, betas=(0.8, 0.98), eps=epsilon, weight_decay=decay
    )
    moments = {name: torch.zeros(kept.shape) for name, kept in rule.state((13, 7)).items()}
    for step in range(20):
        theirs.grad = numbers(13, 7, name=f"{step}") * 1e-3
        direction, factor = rule.direction(theirs.grad, moments, step + 1)
        ours.mul_(1 - rate * decay).sub_(direction, alpha=rate * factor)
        optimizer.step()
    return (ours - theirs.detach()).abs().max().item()


def test_adam_is_pytorchs_where_epsilon_is_outside_of_the_corrected_root() -> None:
    assert stepped("outside_root", 1e-4) < 1e-6
    others: tuple[EpsilonPlace, ...] = ("before_correction", "inside_root")
    for place in others:
        assert stepped(place, 1e-4) > 1e-3
        assert stepped(place, 1e-16) < 1e-5


@pytest.mark.parametrize("nesterov", [False, True])
def test_averaged_momentum_is_a_part_of_momentum(nesterov: bool) -> None:
    averaged, summed = AveragedMomentum(0.9, nesterov), Momentum(0.9)
    ours, theirs = ({"momentum_buffer": torch.zeros(5)} for _ in range(2))
    for step in range(1, 6):
        gradient = numbers(5, name=f"{step}")
        found, _ = averaged.direction(gradient, ours, step)
        expected, _ = summed.direction(gradient, theirs, step)
        if nesterov:
            expected = gradient + 0.9 * expected
        torch.testing.assert_close(found, 0.1 * expected)
