"""The outer factors that proofs compare with, and how much of a gradient a pair lets through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from modicum.adapters import LoRASB, LoRAXS
from modicum.proofs.adapters.outer_factors import LastOuter, RandomOuter, alignment
from modicum.proofs.contracts.adapters.subjects import numbers


def bench(width: int = 6) -> Any:
    layers: list[nn.Module] = []
    for index in range(3):
        layer = nn.Linear(width, width)
        layer.weight.data = numbers(width, width, name=f"{index}")
        layers += [layer, nn.GELU()]
    images, labels = numbers(12, width, name="images"), torch.arange(12) % width
    model = nn.Sequential(*layers, nn.Linear(width, width))
    return SimpleNamespace(base=model, turned=(images, labels), batches=[(images, labels)])


def test_random_and_last_factors_are_what_they_are_called() -> None:
    model = nn.Sequential(nn.Linear(9, 7))
    model[0].weight.data = numbers(7, 9, name="W")
    [(_, random)] = RandomOuter(rank=3).attach(model, name="random").layers()
    one = torch.eye(3)
    torch.testing.assert_close(random.B.T @ random.B, one, rtol=0, atol=1e-5)
    torch.testing.assert_close(random.A @ random.A.T, one, rtol=0, atol=1e-5)
    [(_, last)] = LastOuter(rank=3).attach(model, name="last").layers()
    smallest = torch.linalg.svdvals(model[0].weight.detach())[-3:]
    torch.testing.assert_close(torch.linalg.svdvals(last.B @ last.A)[:3], smallest)


def test_square_orthonormal_factors_let_all_of_a_gradient_through() -> None:
    value = RandomOuter(rank=6, std=0.0)
    assert alignment(bench(), value, 1e-2, (0, 3)) == pytest.approx([1.0, 1.0], abs=1e-5)


def test_narrow_ones_let_a_part_through_and_nothing_is_left_in_the_bench() -> None:
    made = bench()
    before = made.base[0].weight.clone()
    values = (RandomOuter(rank=2, std=0.0), LoRAXS(rank=2), LoRASB(rank=2))
    for value in values:
        [found] = alignment(made, value, 1e-2, (0,))
        assert 0 < found < 0.95
    assert torch.equal(made.base[0].weight, before)
    assert made.base[0].weight.requires_grad
