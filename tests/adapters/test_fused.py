"""The fused operation computes what its parts compute, in every precision."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters.fused import frozen_linear_plus_low_rank
from modicum.proofs.contracts.adapters.subjects import numbers

SCALE = 1.5
Gradients = list[Tensor | None]


def parts(
    dtype: torch.dtype, *, bias: bool, needs: bool, shape: tuple[int, ...]
) -> tuple[Tensor, nn.Linear, nn.Parameter, nn.Parameter]:
    base = nn.Linear(shape[-1], 5, bias=bias, dtype=dtype).requires_grad_(False)
    base.weight.copy_(numbers(5, shape[-1], name="W"))
    if bias:
        base.bias.copy_(numbers(5, name="b"))
    inputs = numbers(*shape).to(dtype).requires_grad_(needs)
    a, b = numbers(2, shape[-1], name="A"), numbers(5, 2, name="B")
    return inputs, base, nn.Parameter(a), nn.Parameter(b)


def composed(x: Tensor, base: nn.Linear, a: Tensor, b: Tensor) -> Tensor:
    thin = nn.functional.linear(x, a.to(x.dtype))
    return base(x) + SCALE * nn.functional.linear(thin, b.to(thin.dtype))


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16", "autocast"])
def test_fused_equals_composed(
    shape: tuple[int, ...], bias: bool, needs: bool, precision: str
) -> None:
    autocast = precision == "autocast"
    dtype = torch.float32 if autocast else getattr(torch, precision)
    results: list[tuple[Tensor, Gradients]] = []
    for fused in (True, False):
        x, base, a, b = parts(dtype, bias=bias, needs=needs, shape=shape)
        around = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with around:
            output = (
                frozen_linear_plus_low_rank(x, base, a, b, SCALE)
                if fused
                else composed(x, base, a, b)
            )
        (output.float() * numbers(*output.shape, name="up")).sum().backward()
        results.append((output, [x.grad, a.grad, b.grad]))
        assert base.weight.grad is None
    (one, ours), (other, theirs) = results
    low = precision in ("bfloat16", "autocast")
    close = {"rtol": 0.05, "atol": 0.15} if low else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(one, other, **close)
    for mine, their in zip(ours, theirs, strict=True):
        assert (mine is None) == (their is None)
        if mine is not None and their is not None:
            torch.testing.assert_close(mine, their, **close)


@pytest.mark.parametrize("trained", ["a", "b"])
def test_a_frozen_factor_takes_no_gradient(trained: str) -> None:
    x, base, a, b = parts(torch.float32, bias=True, needs=True, shape=(4, 7))
    (b if trained == "a" else a).requires_grad_(False)
    frozen_linear_plus_low_rank(x, base, a, b, SCALE).sum().backward()
    assert (a.grad is not None, b.grad is not None) == (trained == "a", trained == "b")
    assert x.grad is not None


def test_nothing_is_kept_without_gradients() -> None:
    x, base, a, b = parts(torch.float32, bias=True, needs=False, shape=(4, 7))
    with torch.no_grad():
        output = frozen_linear_plus_low_rank(x, base, a, b, SCALE)
    assert output.grad_fn is None
    assert not output.requires_grad
