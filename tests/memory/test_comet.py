"""COMET's arithmetic, and the exactness tests of its law."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from modicum.core.codecs.dual_quantization import DualQuantization
from modicum.core.random import normal_, uniform_
from modicum.memory import COMET
from modicum.memory.base import ActivationQuery, Seen


def numbers(*shape: int, name: str) -> Tensor:
    return normal_(torch.empty(shape), seed=0, name=name)


INPUTS = numbers(16, 4, 16, 16, name="inputs").relu()
GRADIENT = numbers(16, 5, 16, 16, name="gradient") * torch.arange(1, 6).view(1, 5, 1, 1)
Errors = Callable[[Tensor, float, int], Tensor]


def uniform(inputs: Tensor, bound: float, draw: int) -> Tensor:
    """Errors as the law takes them for."""
    error = uniform_(torch.empty_like(inputs), -bound, bound, seed=0, name=f"draw {draw}")
    return error * (inputs != 0)


def of_the_codec(inputs: Tensor, bound: float, draw: int) -> Tensor:
    """Errors of the codec, for other inputs of the same kind at each draw."""
    codec, drawn = DualQuantization(), numbers(*inputs.shape, name=f"inputs {draw}").relu()
    return codec.decompress(codec.compress(drawn, bound)) - drawn


def noise(
    inputs: Tensor, gradient: Tensor, bound: float, errors: Errors = uniform, draws: int = 40
) -> Tensor:
    """Standard deviation of each output channel's weight gradient under errors in the inputs."""
    shape = (gradient.shape[1], inputs.shape[1], 3, 3)
    found = [  # the gradient is linear in the inputs
        torch.nn.grad.conv2d_weight(errors(inputs, bound, draw), shape, gradient, padding=1)
        for draw in range(draws)
    ]
    return torch.stack(found).square().mean((0, 2, 3, 4)).sqrt()


@pytest.mark.parametrize("errors", [uniform, of_the_codec])
def test_the_noise_is_what_the_law_says(errors: Errors) -> None:
    share = (INPUTS != 0).float().mean()
    law = 0.1 / math.sqrt(3) * (share * GRADIENT.square().sum((0, 2, 3))).sqrt()
    ratio = noise(INPUTS, GRADIENT, 0.1, errors) / law
    assert 0.85 < float(ratio.min()) <= float(ratio.max()) < 1.15


def test_twice_the_bound_is_twice_the_noise_and_half_the_places_root_two_less() -> None:
    once, twice = (noise(INPUTS, GRADIENT, bound, draws=10) for bound in (0.1, 0.2))
    torch.testing.assert_close(twice / once, torch.full((5,), 2.0), rtol=1e-3, atol=0)
    unit = numbers(16, 5, 16, 16, name="unit")
    halves = noise(INPUTS[:8], unit[:8], 0.1) / noise(INPUTS, unit, 0.1)
    torch.testing.assert_close(halves.mean(), torch.tensor(0.5**0.5), rtol=0.05, atol=0)


def test_the_bound_is_where_the_noise_is_the_tolerance() -> None:
    comet = COMET(tolerance=0.01, finest_bits=24, coarsest=1.0)
    seen = Seen(gradient=7.0, nonzero=0.4, momentum=0.3, largest=5.0)
    bound = comet.next_bound(seen)
    sigma = bound / math.sqrt(3) * math.sqrt(seen.nonzero) * seen.gradient
    assert sigma == pytest.approx(0.01 * 0.3)
    assert COMET(tolerance=0.02, finest_bits=24).next_bound(seen) == pytest.approx(2 * bound)


def test_bounds_are_clamped_at_both_ends() -> None:
    comet = COMET(finest_bits=8, coarsest=0.1)
    loud, quiet = (Seen(1.0, 1.0, momentum=size, largest=4.0) for size in (1e6, 1e-9))
    assert comet.next_bound(loud) == pytest.approx(0.4)
    assert comet.next_bound(quiet) == comet.first_bound(4.0) == 4.0 / 256


def test_updates_are_measured_after_the_warm_up_and_then_now_and_then() -> None:
    comet = COMET(warmup=3, every=10)
    assert [update for update in range(1, 30) if comet.measures(update)] == [3, 13, 23]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_left_is_within_what_the_ledger_says(dtype: torch.dtype) -> None:
    comet, codec = COMET(), DualQuantization()
    least, expected, most = comet.shares(dtype.itemsize)
    normal = numbers(8, 16, 32, 32, name="many").to(dtype)
    for tensor in (normal.relu(), normal, normal.relu() + 1, torch.zeros_like(normal)):
        bound = comet.first_bound(float(tensor.abs().max())) or 1.0
        left = codec.compress(tensor, bound).nbytes / tensor.nbytes
        assert 0.99 * least.values <= left <= 1.005 * most.values
    after_relu = codec.compress(normal.relu(), comet.first_bound(float(normal.max())))
    assert after_relu.nbytes / normal.nbytes == pytest.approx(expected.values, rel=0.15)
    ledger = comet.ledger(ActivationQuery(4000, 800, 400, dtype.itemsize))
    assert ledger.bytes("workspace") == expected.storing * 400 // dtype.itemsize
    kept = ledger.bytes("activation", "loss")
    assert kept == round(4000 * expected.values) + round(800 / (8 * dtype.itemsize))


def test_a_tiny_bound_gives_exact_gradients() -> None:
    convolutions = (nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 2, 3))
    model = nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1], nn.ReLU(), convolutions[2])
    x, found = numbers(2, 3, 16, 16, name="x"), []
    comet = COMET(finest_bits=24).attach(model)
    for context in (torch.enable_grad(), comet.context()):
        with context:
            loss = model(x).square().mean()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for exact, other in zip(*found, strict=True):
        torch.testing.assert_close(other, exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
