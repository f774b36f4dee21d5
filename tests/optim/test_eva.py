"""Eva against dense algebra, its clip and its variants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.optim import SGD, Eva, TransformContext
from modicum.optim.eva import EvaRuntime
from modicum.proofs import run_battery

VARIANTS = pytest.mark.parametrize("variant", ["eva", "f", "s"])
DAMPING = 0.03


def bound(model: nn.Module, **fields: Any) -> EvaRuntime:
    optimizer = SGD([{"params": [parameter], "lr": 1e-3} for parameter in model.parameters()])
    return Eva(**fields).bind(TransformContext(model, optimizer=optimizer))


def gradients(runtime: EvaRuntime) -> list[Tensor]:
    """Each layer's gradient [out, in], with a bias [out, in + 1]."""
    found = []
    for layer in runtime.layers:
        parts = [runtime.parameters[name].grad for name in (layer.weight, layer.bias) if name]
        found.append(torch.cat([part.reshape(layer.out_features, -1) for part in parts], 1))
    return found


def transformed(runtime: EvaRuntime, loss: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each layer's gradient before and after."""
    loss.backward()
    before = gradients(runtime)
    runtime.apply()
    return list(zip(before, gradients(runtime), strict=True))


def of_a_network(bias: bool = True, **fields: Any) -> tuple[EvaRuntime, Tensor]:
    """Eva on a convolution and two linear layers, and their loss."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=bias)
    first, second = nn.Linear(12, 5, bias=bias), nn.Linear(5, 4, bias=not bias)
    model = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), first, nn.Tanh(), second).double()
    runtime = bound(model, **fields)
    return runtime, 3 * model(1 + torch.randn(6, 2, 4, 4, dtype=torch.float64)).square().sum()


def solved(G: Tensor, a: Tensor, g: Tensor, damping: float, variant: str) -> Tensor:
    """The damped curvature's inverse times G, by solving the dense system; vec is row-major."""
    left = torch.eye(len(G)).to(G) if variant == "f" else torch.outer(g, g)
    curvature = torch.kron(left, torch.outer(a, a)) + damping * torch.eye(G.numel()).to(G)
    return torch.linalg.solve(curvature, G.flatten()).view_as(G)


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
    bias=st.booleans(),
    variant=st.sampled_from(["eva", "f", "s"]),
    damping=st.sampled_from([1e-3, 0.03, 10.0, 1e9]),
    seed=st.integers(0, 999),
)
def test_it_is_the_inverse_of_the_dense_curvature_of_means_over_positions(
    sizes: tuple[int, int, int], bias: bool, variant: Any, damping: float, seed: int
) -> None:
    """A bias is a further input, which is 1; of much damping nothing is left but the scale."""
    torch.manual_seed(seed)
    batch, width, out = sizes
    layer = nn.Linear(width, out, bias=bias).double()
    inputs = torch.randn(batch, 2, width, dtype=torch.float64)
    runtime, output = bound(layer, variant=variant, damping=damping, kl_clip=None), layer(inputs)
    output.retain_grad()
    ((G, P),) = transformed(runtime, output.square().mean())
    a, g = inputs.mean((0, 1)), output.grad.mean((0, 1))
    if variant == "s":  # which has no hooks, and leaves a bias alone
        a, g = G.mean(0), G.mean(1)
        assert not bias or torch.equal(layer.bias.grad, output.grad.sum((0, 1)))
    elif bias:
        a = torch.cat([a, torch.ones(1, dtype=torch.float64)])
    expected = damping * solved(G, a, g, damping, variant)
    torch.testing.assert_close(damping * P, expected, rtol=1e-9, atol=1e-9)


@VARIANTS
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_and_several_layers(bias: bool, variant: Any) -> None:
    runtime, loss = of_a_network(bias, variant=variant, kl_clip=None)
    pairs = transformed(runtime, loss)
    assert len(pairs) == 3
    for (G, P), (a, g) in zip(pairs, runtime.means.vectors, strict=True):
        torch.testing.assert_close(P, solved(G, a, g, DAMPING, variant), rtol=1e-9, atol=1e-9)
        assert (P - G / DAMPING).abs().max() > 1e-4 * P.abs().max()


@pytest.mark.parametrize("zero", ["a", "g"])
def test_where_a_mean_is_zero_the_gradient_is_scaled(zero: str) -> None:
    layer = nn.Linear(3, 2, bias=False).double()
    inputs, weights = (torch.randn(2, width, dtype=torch.float64) for width in (3, 2))
    opposite = inputs if zero == "a" else weights
    opposite[1] = -opposite[0]
    runtime = bound(layer, kl_clip=None, damping=0.25)
    ((G, P),) = transformed(runtime, (layer(inputs) * weights).sum())
    assert torch.equal(P, G * 4)


@VARIANTS
@pytest.mark.parametrize("kappa", [1e-6, 1e9, 0.0])
def test_the_clip_bounds_the_change_or_keeps_the_norm(variant: Any, kappa: float) -> None:
    pairs = transformed(*of_a_network(variant=variant, kl_clip=None))
    G, P = (torch.cat([each.flatten() for each in side]) for side in zip(*pairs, strict=True))
    runtime, loss = of_a_network(variant=variant, kl_clip=kappa)
    runtime.context.optimizer.param_groups[2]["lr"] = 0.01  # the largest counts, as it is now
    change = float(P @ G) * 0.01**2
    nu = min(1.0, math.sqrt(kappa / change)) if kappa else float(G.norm() / P.norm())
    clipped = torch.cat([each.flatten() for _, each in transformed(runtime, loss)])
    torch.testing.assert_close(clipped, nu * P, rtol=1e-9, atol=0)
    assert (nu == 1) == (kappa == 1e9)
    # nu^2 bounds the quadratic form <P, F P>, of which <P, G> is the larger, damped one.
    assert kappa == 0 or change * nu**2 <= kappa * (1 + 1e-9)


@pytest.mark.parametrize("kl_clip", [None, 0.0, 1e-3])
def test_gradients_of_zero_stay_zero(kl_clip: float | None) -> None:
    layer = nn.Linear(3, 2)
    ((_, P),) = transformed(bound(layer, kl_clip=kl_clip), (0 * layer(torch.ones(2, 3))).sum())
    assert not P.any()


@pytest.mark.parametrize("variant", ["f", "s"])
def test_the_variants_pass_the_battery(variant: Any) -> None:
    results = run_battery(Eva(variant=variant), cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []
