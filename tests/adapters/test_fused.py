"""The fused operation computes what its parts compute, in every precision, on every form."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from modicum.adapters.fused import low_rank
from modicum.core.layers.frozen_product import frozen_product
from modicum.core.layers.linear_forms import linear_form
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import numbers

SCALE = 1.5
OUT = 5
FORMS = ["dense", "Conv1D", "nf4", "int8", "fp16"]
Gradients = list[Tensor | None]


def layer(form: str, ins: int, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """A frozen layer of a form."""
    weight, offset = numbers(OUT, ins, name="W"), numbers(OUT, name="b") if bias else None
    if form == "Conv1D":
        made: nn.Module = Conv1D(OUT, ins)
        made.load_state_dict({"weight": weight.T, "bias": numbers(OUT, name="b")})
    else:
        made = linear_form(form).from_dense(weight, offset)
    return made.to(dtype).requires_grad_(False)


def fused(x: Tensor, base: Any, a: Tensor, b: Tensor, dropout: float = 0.0) -> Tensor:
    product = frozen_product(base)
    assert product is not None
    return low_rank(x, product, a, b, SCALE, dropout)


def apart(x: Tensor, base: Any, a: Tensor, b: Tensor, dropout: float = 0.0) -> Tensor:
    return base(x) + low_rank(x, None, a, b, SCALE, dropout)  # type: ignore[no-any-return]


def composed(x: Tensor, base: Any, a: Tensor, b: Tensor, dropout: float = 0.0) -> Tensor:
    thin = F.linear(F.dropout(x, dropout), a.to(x.dtype))
    return base(x) + SCALE * F.linear(thin, b.to(thin.dtype))  # type: ignore[no-any-return]


def factors(ins: int, dtype: torch.dtype | None = None) -> tuple[nn.Parameter, nn.Parameter]:
    made = numbers(2, ins, name="A"), numbers(OUT, 2, name="B")
    return nn.Parameter(made[0].to(dtype)), nn.Parameter(made[1].to(dtype))


def both(
    base: Any, x: Tensor, around: Any, dropout: float = 0.0, *, needs: bool = True, how: Any = fused
) -> list[tuple[Tensor, Gradients]]:
    """Output and gradients of the fused operation, and of its parts."""
    results = []
    for run in (how, composed):
        given = x.clone().requires_grad_(needs)
        a, b = factors(x.shape[-1], torch.bfloat16 if x.dtype == torch.bfloat16 else None)
        torch.manual_seed(3)
        with around():
            output = run(given, base, a, b, dropout)
        (output.float() * numbers(*output.shape, name="up")).sum().backward()
        results.append((output, [given.grad, a.grad, b.grad]))
    return results


def compared(results: list[tuple[Tensor, Gradients]], *, low: bool = False) -> None:
    (one, ours), (other, theirs) = results
    close = {"rtol": 0.05, "atol": 0.2} if low else {"rtol": 1e-5, "atol": 2e-5}
    torch.testing.assert_close(one, other, **close)
    for mine, their in zip(ours, theirs, strict=True):
        assert (mine is None) == (their is None)
        if mine is not None and their is not None:
            torch.testing.assert_close(mine, their, **close)


def bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16", "autocast"])
def test_fused_equals_composed(
    shape: tuple[int, ...], bias: bool, needs: bool, precision: str
) -> None:
    autocast = precision == "autocast"
    dtype = torch.float32 if autocast else getattr(torch, precision)
    base = layer("dense", 7, bias=bias, dtype=dtype)
    around = bf16 if autocast else contextlib.nullcontext
    found = both(base, numbers(*shape).to(dtype), around, needs=needs)
    compared(found, low=precision in ("bfloat16", "autocast"))
    assert base.weight.grad is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dropout", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("around", [contextlib.nullcontext, bf16])
def test_every_form_with_dropout(form: str, dropout: float, around: Any) -> None:
    for how in (fused, apart):
        found = both(layer(form, 70), numbers(2, 9, 70), around, dropout, how=how)
        compared(found, low=around is bf16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("trained", "kept"), [("both", 70), ("b", 0)])
def test_what_is_kept(form: str, trained: str, kept: int) -> None:
    """x where A is trained, the thin product, a bit an element for dropout; nothing else."""
    rows, base, (a, b) = 16, layer(form, 70), factors(70)
    a.requires_grad_(trained == "both")
    x = numbers(rows, 70).requires_grad_(True)
    for around, dropout in ((contextlib.nullcontext, 0.0), (bf16, 0.0), (bf16, 0.3)):
        with saved_bytes([*base.parameters(), a, b]) as saved, around():
            fused(x, base, a, b, dropout)
        thin = 2 * rows * (4 if around is contextlib.nullcontext else 2)
        assert saved.total == 4 * rows * kept + thin + (dropout > 0) * rows * 70 // 8


@pytest.mark.parametrize("trained", ["a", "b"])
def test_a_frozen_factor_takes_no_gradient(trained: str) -> None:
    x, base, (a, b) = numbers(4, 7).requires_grad_(True), layer("dense", 7), factors(7)
    (b if trained == "a" else a).requires_grad_(False)
    fused(x, base, a, b).sum().backward()
    assert (a.grad is not None, b.grad is not None) == (trained == "a", trained == "b")
    assert x.grad is not None


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_can_be_differentiated_twice(dropout: float) -> None:
    def seconds(run: Any) -> Tensor:
        x, (a, b) = numbers(4, 7, dtype=torch.float64).requires_grad_(True), factors(7)
        a, b = a.double().detach().requires_grad_(True), b.double().detach().requires_grad_(True)
        torch.manual_seed(3)
        output = run(x, layer("dense", 7, dtype=torch.float64), a, b, dropout)
        first = torch.autograd.grad(output.square().sum(), (x, a, b), create_graph=True)
        return torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(sum(g.square().sum() for g in first), (x, a, b))
            ]
        )

    torch.testing.assert_close(seconds(fused), seconds(composed))
    torch.testing.assert_close(seconds(apart), seconds(composed))
    x, (a, b) = numbers(4, 7).requires_grad_(True), factors(7)
    output = fused(x, layer("dense", 7), a.requires_grad_(False), b)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(output.sum(), (x, b), create_graph=True)


def test_nothing_is_kept_without_gradients() -> None:
    x, base, (a, b) = numbers(4, 7), layer("dense", 7), factors(7)
    with torch.no_grad():
        output = fused(x, base, a, b)
    assert output.grad_fn is None
    assert not output.requires_grad


def test_what_is_trained_or_computes_otherwise_is_no_frozen_product() -> None:
    class Twice(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return 2 * super().forward(input)

    assert frozen_product(nn.Linear(4, 2)) is None
    assert frozen_product(Twice(4, 2).requires_grad_(False)) is None
    assert frozen_product(nn.Embedding(4, 2).requires_grad_(False)) is None
    trained = layer("nf4", 70)
    trained.bias.requires_grad_(True)
    assert frozen_product(trained) is None
