"""COMET's arithmetic, and the exactness tests of its law."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.codecs.dual_quantization import DualQuantization
from modicum.core.errors import InputError
from modicum.core.machine.memory import TensorMeter
from modicum.core.random import normal_, uniform_
from modicum.memory import COMET
from modicum.memory.base import ActivationQuery, Seen


def numbers(*shape: int, name: str) -> Tensor:
    return normal_(torch.empty(shape), seed=0, name=name)


def weight_gradient(inputs: Tensor, gradient: Tensor) -> Tensor:
    shape = (gradient.shape[1], inputs.shape[1], 3, 3)
    return torch.nn.grad.conv2d_weight(inputs, shape, gradient, padding=1)


def noise(inputs: Tensor, gradient: Tensor, bound: float, draws: int = 40) -> Tensor:
    """Standard deviation of each output channel's weight gradient under uniform errors."""
    exact, found = weight_gradient(inputs, gradient), []
    for draw in range(draws):
        error = uniform_(torch.empty_like(inputs), -bound, bound, seed=0, name=f"draw {draw}")
        found.append(weight_gradient(inputs + error * (inputs != 0), gradient) - exact)
    return torch.stack(found).square().mean((0, 2, 3, 4)).sqrt()


def predicted(inputs: Tensor, gradient: Tensor, bound: float) -> Tensor:
    share = (inputs != 0).float().mean()
    return bound / math.sqrt(3) * (share * gradient.square().sum((0, 2, 3))).sqrt()


INPUTS = numbers(16, 4, 16, 16, name="inputs").relu()
GRADIENT = numbers(16, 5, 16, 16, name="gradient") * torch.arange(1, 6).view(1, 5, 1, 1)


def test_the_noise_is_what_the_law_says() -> None:
    ratio = noise(INPUTS, GRADIENT, 0.1) / predicted(INPUTS, GRADIENT, 0.1)
    assert bool((ratio > 0.85).all())
    assert bool((ratio < 1.15).all())


def test_the_codecs_errors_are_as_uniform_as_the_law_assumes() -> None:
    codec = DualQuantization()
    found = []
    for draw in range(40):
        inputs = numbers(16, 4, 16, 16, name=f"inputs {draw}").relu()
        restored = codec.decompress(codec.compress(inputs, 0.1))
        found.append(weight_gradient(restored - inputs, GRADIENT))
    measured = torch.stack(found).square().mean((0, 2, 3, 4)).sqrt()
    ratio = measured / predicted(INPUTS, GRADIENT, 0.1)
    assert bool((ratio > 0.85).all())
    assert bool((ratio < 1.15).all())


def test_twice_the_bound_is_twice_the_noise_and_half_the_places_root_two_less() -> None:
    once, twice = noise(INPUTS, GRADIENT, 0.1, 10), noise(INPUTS, GRADIENT, 0.2, 10)
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
    loud = Seen(gradient=1.0, nonzero=1.0, momentum=1e6, largest=4.0)
    quiet = Seen(gradient=1.0, nonzero=1.0, momentum=1e-9, largest=4.0)
    assert comet.next_bound(loud) == pytest.approx(0.4)
    assert comet.next_bound(quiet) == comet.first_bound(4.0) == 4.0 / 256


def test_updates_are_measured_after_the_warm_up_and_then_now_and_then() -> None:
    comet = COMET(warmup=3, every=10)
    assert [update for update in range(1, 30) if comet.measures(update)] == [3, 13, 23]


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_what_is_left_is_within_what_the_ledger_says(element_bytes: int) -> None:
    comet, codec = COMET(), DualQuantization()
    least, expected, most = comet.shares(element_bytes)
    dtype = torch.float32 if element_bytes == 4 else torch.bfloat16
    normal = numbers(8, 16, 32, 32, name="many").to(dtype)
    for tensor in (normal.relu(), normal, normal.relu() + 1, torch.zeros_like(normal)):
        bound = comet.first_bound(float(tensor.abs().max())) or 1.0
        left = codec.compress(tensor, bound).nbytes / tensor.nbytes
        assert 0.99 * least.values <= left <= 1.005 * most.values
    bound = comet.first_bound(float(normal.max()))
    after_relu = codec.compress(normal.relu(), bound).nbytes / normal.nbytes
    assert after_relu == pytest.approx(expected.values, rel=0.15)
    ledger = comet.ledger(ActivationQuery(4000, 800, 400, element_bytes))
    assert ledger.bytes("workspace") == expected.storing * 400 // element_bytes
    kept = ledger.bytes("activation", "loss")
    assert kept == round(4000 * expected.values) + round(800 / (8 * element_bytes))


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_workspace_is_what_the_meter_sees(element_bytes: int) -> None:
    comet, codec = COMET(), DualQuantization()
    dtype = torch.float32 if element_bytes == 4 else torch.bfloat16
    tensor = numbers(8, 8, 16, 16, name="metered").relu().to(dtype)
    with TensorMeter("cpu") as storing:
        record = codec.compress(tensor, comet.first_bound(float(tensor.max())))
    with TensorMeter("cpu") as restoring:
        restored = codec.decompress(record)
    expected = comet.shares(element_bytes).expected
    assert storing.peak is not None
    assert restoring.peak is not None
    assert storing.peak == pytest.approx(expected.workspace(tensor.numel()), rel=0.05)
    inside = restoring.peak - restored.nbytes
    assert inside == pytest.approx(expected.workspace(tensor.numel(), restore=True), rel=0.05)
    assert expected.workspace(1 << 20) == expected.workspace(1 << 17)


def test_a_tiny_bound_gives_exact_gradients() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3)
    )
    x, found = numbers(2, 3, 16, 16, name="x"), []
    comet = COMET(finest_bits=24).attach(model)
    for context in (torch.enable_grad(), comet.context()):
        with context:
            loss = model(x).square().mean()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for exact, other in zip(*found, strict=True):
        torch.testing.assert_close(other, exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


def test_measured_noise_of_a_layer_is_the_predicted_one() -> None:
    """Through the whole machine: bound from statistics, codec, backward pass."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1))
    for name, parameter in model.named_parameters():
        normal_(parameter, seed=0, name=name, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    comet = COMET(warmup=1, every=1, finest_bits=20).attach(model)
    ratios = []
    for draw in range(20):
        x, target = numbers(8, 3, 16, 16, name=f"x{draw}"), numbers(8, 6, 16, 16, name=f"y{draw}")

        def loss(x: Tensor = x, target: Tensor = target) -> Tensor:
            return F.mse_loss(model(x), target)

        (exact,) = torch.autograd.grad(loss(), [model[2].weight])
        with comet.context():
            total = loss()
        used = comet.layers[1].bound
        total.backward()
        error = (model[2].weight.grad - exact).square().mean((1, 2, 3)).sqrt()
        comet.observe(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        comet.after_step()
        seen = comet.layers[1].seen
        assert seen is not None
        if draw:
            sigma = used / math.sqrt(3) * seen.gradient * math.sqrt(seen.nonzero)
            ratios.append(float(error.median()) / sigma)
    assert 0.85 < sum(ratios) / len(ratios) < 1.15


def test_wrong_fields_are_refused() -> None:
    for fields, said in (({"finest_bits": 1}, "too small"), ({"coarsest": 1.5}, "too large")):
        with pytest.raises(InputError, match=said):
            COMET(**fields)
