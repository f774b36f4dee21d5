"""Attention by a truncated series: exact where it must be, linear in length, and its refusals."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modicum.core.errors import InputError
from modicum.core.layers.taylor_attention import (
    approx_attention,
    columns,
    features,
    series,
    weighted_sums,
)
from modicum.core.random import normal_
from modicum.proofs.adapters.attention_bench import chunked, exact_gradients, head


def drawn(*shape: int, name: str, gamma: float | None = None) -> Tensor:
    found = normal_(torch.empty(shape, dtype=torch.float64), seed=0, name=name)
    return found if gamma is None else found * gamma / found.abs().max()


def parts(length: int, gamma: float = 0.5, width: int = 4) -> list[Tensor]:
    q, k = (drawn(2, 3, length, width, name=name, gamma=gamma) for name in "qk")
    return [q, k, drawn(2, 3, length, 5, name="v"), drawn(2, 3, length, 5, name="gradient")]


def gradients(attend, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*given)
    return [out.detach(), *torch.autograd.grad(out, given, gradient)]


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)


def test_the_formula_is_autograd_s() -> None:
    q, k, v, gradient = parts(40, gamma=2.0)
    weights = (q @ k.mT).softmax(-1)
    found = [weights @ v, *exact_gradients(q, k, v, gradient, weights)]
    assert apart(found, gradients(exact, q, k, v, gradient)) < 1e-12


def test_exact_attention_in_chunks_is_exact() -> None:
    given = parts(300, gamma=2.0)
    assert apart(gradients(chunked, *given), gradients(exact, *given)) < 1e-12


def test_products_of_khatri_rao_products() -> None:
    u1, v1, u2, v2 = (drawn(7, width, name=f"{width}{n}") for n, width in enumerate((3, 3, 4, 4)))

    def rows(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("la,lb->lab", a, b).flatten(1)

    found = rows(u1, u2) @ rows(v1, v2).T
    assert float((found - (u1 @ v1.T) * (u2 @ v2.T)).abs().max()) < 1e-12


@pytest.mark.parametrize(("width", "degree"), [(1, 5), (3, 4), (4, 12), (6, 2)])
def test_features_give_the_series(width: int, degree: int) -> None:
    q, k = drawn(9, width, name="q"), drawn(8, width, name="k")
    left, right = features(q, degree), features(k, degree)
    assert left.shape[-1] == columns(width, degree) == math.comb(width + degree, degree)
    true = sum((q @ k.T) ** t / math.factorial(t) for t in range(degree + 1))
    scale = float(true.abs().max())
    assert float((left @ right.T - true).abs().max()) < 1e-12 * scale
    assert float((series(q @ k.T, degree) - true).abs().max()) < 1e-12 * scale


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "degree"), [(1, 2), (7, 3), (256, 2), (300, 4), (513, 1)])
def test_gradients_are_those_at_the_approximate_weights(
    length: int, degree: int, causal: bool
) -> None:
    q, k, v, gradient = parts(length)
    weights = series(q @ k.mT, degree)
    weights = weights.tril() if causal else weights
    weights = weights / weights.sum(-1, keepdim=True)
    true = [weights @ v, *exact_gradients(q, k, v, gradient, weights)]

    def attend(*given: Tensor) -> Tensor:
        return approx_attention(*given, degree, is_causal=causal, scale=1.0)

    assert apart(gradients(attend, q, k, v, gradient), true) < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_degree_12_is_exact_at_gamma_a_half(causal: bool) -> None:
    given = parts(300)

    def attend(*each: Tensor) -> Tensor:
        return approx_attention(*each, 12, is_causal=causal, scale=1.0)

    def true(*each: Tensor) -> Tensor:
        return exact(*each, causal=causal)

    assert apart(gradients(attend, *given), gradients(true, *given)) < 1e-10


def test_sums_over_later_rows_are_the_transposed_ones() -> None:
    q, k, v, _ = parts(300)
    weights = series(q @ k.mT, 3).triu()
    assert apart([weighted_sums(q, k, v, 3, True, later=True)], [weights @ v]) < 1e-12


def test_other_positions_and_queries_of_another_number() -> None:
    q, k, v, _ = parts(30)
    found = approx_attention(q[..., :11, :], k, v, 12, scale=1.0)
    assert apart([found], [exact(q, k, v)[..., :11, :]]) < 1e-10


@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_a_row_sum_to_one(causal: bool) -> None:
    q, k, v, _ = parts(50, gamma=2.0)
    found = approx_attention(q, k, torch.ones_like(v), 2, is_causal=causal)
    assert float((found - 1).abs().max()) < 1e-12


def test_scale_and_groups_are_those_of_pytorch() -> None:
    q, (k, v) = parts(20)[0], (x[:, :1] for x in parts(20)[1:3])
    true = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    found = approx_attention(q, k, v, 10, is_causal=True, enable_gqa=True)
    assert apart([found], [true]) < 1e-10


def test_gradients_of_factors_follow_from_that_of_the_weight() -> None:
    one, scale = head(0.5, 64, dtype=torch.float64), 2.0
    a, b = drawn(2, 16, name="A", gamma=0.05), drawn(4, 2, name="B", gamma=0.05)
    factors = [a.clone().requires_grad_(), b.clone().requires_grad_()]

    def attend(q: Tensor) -> Tensor:
        return approx_attention(q, one.k, one.v, 4, scale=1.0)

    q = one.q + scale * one.x @ factors[0].T @ factors[1].T
    found = torch.autograd.grad(attend(q), factors, one.gradient)
    plain = (one.q + scale * one.x @ a.T @ b.T).requires_grad_()
    (dq,) = torch.autograd.grad(attend(plain), plain, one.gradient)
    weight = dq[0, 0].T @ one.x
    assert apart(list(found), [scale * b.T @ weight, scale * weight @ a.T]) < 1e-12


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_length(causal: bool) -> None:
    largest = []
    for length in (1024, 2048):
        one = head(0.5, length)
        given = [x.requires_grad_() for x in (one.q, one.k, one.v)]
        with Largest() as seen:
            out = approx_attention(*given, 3, is_causal=causal)
            torch.autograd.grad(out, given, one.gradient)
        largest.append(seen.elements)
    # Of keys and values, and once more of their row-wise Kronecker product.
    assert largest[1] <= 2 * largest[0]
    assert largest[1] < 2048 * 64


def test_half_precision_is_computed_in_fp32() -> None:
    one = head(0.5, 100)
    given = [x.bfloat16() for x in (one.q, one.k, one.v)]
    found = approx_attention(*given, 8, scale=1.0)
    assert found.dtype == torch.bfloat16
    true = exact(*(x.float() for x in given)).bfloat16()
    assert float((found - true).abs().max()) <= 2**-8
    with torch.autocast("cpu", torch.bfloat16):
        out = approx_attention(one.q, one.k, one.v, 8, scale=1.0)
    assert apart([out], [exact(one.q, one.k, one.v)]) < 1e-5


def test_wide_heads_are_refused_with_their_columns() -> None:
    wide = torch.zeros(1, 1, 4, 64)
    with pytest.raises(
        InputError, match=r"width 64 has 47,905 columns at degree 3, and at most 4,"
    ):
        approx_attention(wide, wide, wide, 3)
    narrow = torch.zeros(1, 1, 4, 4)
    with pytest.raises(InputError, match=r"35 columns at degree 3, and at most 34"):
        approx_attention(narrow, narrow, narrow, 3, most_columns=34)
    with pytest.raises(InputError, match="begins with degree 1"):
        approx_attention(narrow, narrow, narrow, 0)


def test_an_odd_degree_whose_weights_are_not_positive_is_refused() -> None:
    q = torch.full((1, 1, 3, 1), 4.0)
    with pytest.raises(InputError, match="use an even one"):
        approx_attention(q, -q, q, 3, scale=1.0)
    assert bool(approx_attention(q, -q, q, 4, scale=1.0).isfinite().all())


def test_shapes_that_do_not_go_together_are_refused() -> None:
    q, k, v, _ = parts(6)
    with pytest.raises(InputError, match="do not go together"):
        approx_attention(q, k[..., :3], v, 2)
    with pytest.raises(InputError, match="do not go together"):
        approx_attention(q, k[:, :1], v[:, :1], 2)
    with pytest.raises(InputError, match="as many keys as queries"):
        approx_attention(q[..., :3, :], k, v, 2, is_causal=True)
