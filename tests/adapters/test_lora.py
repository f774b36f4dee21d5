"""LoRA's first values and its scale; what all adapters promise is in the battery."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from modicum.adapters import LoRA
from modicum.proofs.contracts.adapters.subjects import numbers, odd_model, stir


def test_a_starts_uniform_by_the_width_of_the_inputs_and_b_zero() -> None:
    adapter = LoRA(rank=32).attach(nn.Sequential(nn.Linear(64, 200)))
    _, layer = next(adapter.layers())
    # Kaiming's bound with a = sqrt(5) is 1 / sqrt(in); without it, it would be 2.4 times as large.
    assert 0.99 / math.sqrt(64) < layer.A.abs().max() <= 1 / math.sqrt(64)
    assert layer.A.std().item() == pytest.approx(1 / math.sqrt(3 * 64), rel=0.05)
    assert layer.A.mean().abs() < 0.05 / math.sqrt(64)
    assert not layer.B.any()


def test_on_an_embedding_a_starts_zero_and_b_normal() -> None:
    adapter = LoRA(rank=32, targets=("0",)).attach(nn.Sequential(nn.Embedding(50, 64)))
    _, layer = next(adapter.layers())
    assert (layer.A.shape, layer.B.shape) == ((32, 50), (64, 32))
    assert not layer.A.any()
    assert layer.B.std().item() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (6.0, 1.5)])
def test_the_update_is_scaled_by_alpha_over_the_rank(alpha: float | None, scale: float) -> None:
    model, inputs = odd_model(), numbers(3, 13)
    narrow = model.get_submodule("narrow")
    before = narrow(inputs)
    adapter = stir(LoRA(rank=4, alpha=alpha).attach(model))
    layer = dict(adapter.layers())["narrow"]
    update = scale * inputs @ layer.A.T @ layer.B.T
    torch.testing.assert_close(narrow(inputs), before + update)
