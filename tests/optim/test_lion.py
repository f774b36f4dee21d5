"""Lion: the paper's algorithm, and half of AdamW's state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.machine.memory import bytes_by_kind
from modicum.optim import AdamW, Lion
from modicum.proofs.contracts.optim.subjects import TrainedOptimizer, llama, numbers


def test_twenty_steps_are_algorithm_two() -> None:
    weight = nn.Parameter(numbers(13, 7))
    optimizer = Lion([weight], lr=0.02, betas=(0.9, 0.95), weight_decay=0.3)
    expected, moment = weight.detach().clone(), torch.zeros(13, 7)
    for step in range(20):
        gradient = numbers(13, 7, name=f"{step}")
        weight.grad = gradient.clone()
        update = torch.sign(0.9 * moment + 0.1 * gradient)
        expected = expected * (1 - 0.02 * 0.3) - 0.02 * update
        moment = 0.95 * moment + 0.05 * gradient
        optimizer.step()
    assert (weight - expected).abs().max() < 1e-6


def test_twenty_steps_are_those_of_pytorch_optimizer() -> None:
    other = pytest.importorskip("pytorch_optimizer")
    ours, theirs = (nn.Parameter(numbers(13, 7)) for _ in range(2))
    fields = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    pair = Lion([ours], **fields), other.Lion([theirs], weight_decouple=True, **fields)
    for step in range(20):
        for weight, optimizer in zip((ours, theirs), pair, strict=True):
            weight.grad = numbers(13, 7, name=f"{step}")
            optimizer.step()
    assert (ours - theirs).abs().max() < 1e-6


def test_weights_in_fp64_are_updated_in_fp64() -> None:
    weight = nn.Parameter(numbers(13, 7, dtype=torch.float64))
    optimizer, before = Lion([weight], lr=0.02), weight.detach().clone()
    weight.grad = 1e-60 * numbers(13, 7, name="gradient", dtype=torch.float64)
    optimizer.step()
    assert torch.equal(weight, before - 0.02 * weight.grad.sign())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_is_half_of_adamws_moments_to_the_byte(dtype: torch.dtype) -> None:
    at = OptimizerQuery(trained_shapes(llama(dtype)))
    moments = AdamW.value().ledger(at).bytes("optimizer") - 4 * len(at.parameters)
    training = TrainedOptimizer(Lion.value(), llama(dtype))
    training.steps(0, 1)
    kept = bytes_by_kind(training.model, training.optimizer)["optimizer"]
    assert 2 * kept == moments
