"""Attention whose exponentials are truncated series, so that time and memory are linear in length.

With the features phi(x) of degree g, phi(q) phi(k)^T is the series of exp(q k^T) up to its g-th
term. So the attention matrix f has a factorization of as many columns as there are features, and
so have the matrices of its gradients. Nothing of L x L is made, in either direction.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from modicum.core.errors import InputError

# More features than this are refused: a linear path is no gain then at lengths that one can have.
MOST_COLUMNS = 4096
# Positions at a time: what is made of them is all that is held at once.
_CHUNK = 256


def columns(width: int, degree: int) -> int:
    """How many features a head of this width has: all monomials of at most this degree.

    >>> columns(4, 3), columns(64, 3)
    (35, 47905)
    """
    return math.comb(width + degree, degree)


def check_columns(width: int, degree: int, most: int = MOST_COLUMNS) -> None:
    """Refuse a head that is too wide for a degree.

    Raises:
        InputError: it has more columns than `most`; with how many these are.
    """
    if degree < 1:
        raise InputError("a series begins with degree 1", field="degree", value=degree)
    if (found := columns(width, degree)) > most:
        raise InputError(
            f"a head of width {width} has {found:,} columns at degree {degree}, and at most "
            f"{most:,} are taken; use a lower degree, narrower heads, or exact attention",
            field="degree",
            value=degree,
        )


def features(x: Tensor, degree: int) -> Tensor:
    """phi: x [..., d] to [..., columns], with phi(q) phi(k)^T = sum over t <= g of (q k^T)^t / t!.

    A feature is a monomial of x over the root of the factorials of its exponents.

    >>> q, k = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 0.25])
    >>> s = float(q @ k)
    >>> abs(float(features(q, 3) @ features(k, 3)) - (1 + s + s**2 / 2 + s**3 / 6)) < 1e-6
    True
    """
    parents, factors, weights = _monomials(x.shape[-1], degree)
    blocks = [x.new_ones((*x.shape[:-1], 1))]
    for parent, factor in zip(parents, factors, strict=True):
        last = blocks[-1].index_select(-1, parent.to(x.device))
        blocks.append(last * x.index_select(-1, factor.to(x.device)))
    return torch.cat(blocks, -1) * weights.to(x)


def series(scores: Tensor, degree: int) -> Tensor:
    """The sum over t <= g of s^t / t!, of each entry."""
    total = torch.ones_like(scores)
    for t in range(degree, 0, -1):
        total = 1 + scores * total / t
    return total


@functools.lru_cache(maxsize=64)
def _monomials(width: int, degree: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """For each degree, of which monomial of one less and which entry a monomial is the product.

    And of all of them, from degree 0, the weights.
    """
    known: list[tuple[int, ...]] = [()]
    parents, factors, weights = [], [], [1.0]
    for t in range(1, degree + 1):
        places = {exponents: place for place, exponents in enumerate(known)}
        known = list(itertools.combinations_with_replacement(range(width), t))
        parents.append(torch.tensor([places[one[:-1]] for one in known]))
        factors.append(torch.tensor([one[-1] for one in known]))
        for one in known:
            repeated = (math.factorial(one.count(entry)) for entry in set(one))
            weights.append(1 / math.sqrt(math.prod(repeated)))
    return parents, factors, torch.tensor(weights, dtype=torch.float64)


def weighted_sums(
    q: Tensor, k: Tensor, values: Tensor, degree: int, causal: bool, *, later: bool = False
) -> Tensor:
    """For each row i the sum over j of phi(q_i) phi(k_j)^T values_j.

    Args:
        q: [..., L, d]; k [..., S, d] and values [..., S, c] are of other positions.
        causal: j goes to i, both among them, and L is S.
        later: with `causal`, from i instead.
    """
    if not causal:
        state = _state(k, values, degree)
        rows = (features(part, degree) @ state for part in q.split(_CHUNK, -2))
        return torch.cat(list(rows), -2)
    parts = list(zip(*(x.split(_CHUNK, -2) for x in (q, k, values)), strict=True))
    done, before = [], None
    for queries, keys, given in reversed(parts) if later else parts:
        # Within the chunk as in exact attention: its square is small.
        inner = series(queries @ keys.mT, degree)
        found = (inner.triu() if later else inner.tril()) @ given
        if before is not None:
            found = found + features(queries, degree) @ before
        state = features(keys, degree).mT @ given
        before = state if before is None else before + state
        done.append(found)
    return torch.cat(done[::-1] if later else done, -2)


def _state(k: Tensor, values: Tensor, degree: int) -> Tensor:
    """phi(k)^T values, chunk by chunk."""
    pairs = zip(k.split(_CHUNK, -2), values.split(_CHUNK, -2), strict=True)
    return functools.reduce(torch.add, (features(a, degree).mT @ b for a, b in pairs))


def _rows(left: Tensor, right: Tensor) -> Tensor:
    """The row-wise Kronecker product: [..., L, a] and [..., L, b] to [..., L, a b]."""
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


class TaylorAttention(torch.autograd.Function):
    """f V with f = phi(Q) phi(K)^T over its row sums, and the gradients of exact attention at f.

    With the output's gradient D and q = D V^T, these are

        p = f * q - diag(rowsum(f * q)) f;  dQ = p K,  dK = p^T Q,  dV = f^T D.

    f * q is the product of row-wise Kronecker products, (U1 [x] D)(V1 [x] V)^T, for f = U1 V1^T. So
    (f * q) K takes phi(K)^T (V [x] K), of columns x d^2, and each row is contracted with D at last;
    the row sums are those of D * O.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, degree: int, causal: bool) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            ones = torch.ones_like(v[..., :1])
            sums = weighted_sums(q, k, torch.cat([v, ones], -1), degree, causal)
        total = sums[..., -1:]
        if degree % 2 and bool((total <= 0).any()):
            raise InputError(
                "scores are so far below zero that weights of a row sum to no positive number, "
                "which an odd degree allows; use an even one",
                field="degree",
                value=degree,
            )
        out = sums[..., :-1] / total
        ctx.save_for_backward(q, k, v, out, total)
        ctx.degree, ctx.causal = degree, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            each = {"degree": ctx.degree, "causal": ctx.causal}
            # D over the row sums of phi: so f is phi(Q) phi(K)^T alone below.
            scaled = gradient / total
            sums = (scaled * out).sum(-1, keepdim=True)
            width, d_q = v.shape[-1], k.shape[-1]
            both = weighted_sums(q, k, torch.cat([_rows(v, k), k], -1), **each)
            products, plain = both.split([width * d_q, d_q], -1)
            dq = (products.unflatten(-1, (width, d_q)) * scaled.unsqueeze(-1)).sum(-2)
            dq = dq - sums * plain
            given = torch.cat([_rows(scaled, q), sums * q, scaled], -1)
            # Of keys: the sum over the queries that see them.
            both = weighted_sums(k, q, given, **each, later=True)
            products, plain, dv = both.split([width * d_q, d_q, width], -1)
            dk = (products.unflatten(-1, (width, d_q)) * v.unsqueeze(-1)).sum(-2) - plain
        return dq, dk, dv, None, None


def approx_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    degree: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    most_columns: int = MOST_COLUMNS,
) -> Tensor:
    """`scaled_dot_product_attention` in time linear in length, for narrow heads of small scores.

    The gradients are those of exact attention, of the approximate weights. All is computed in fp32
    at least, as the largest score of a row cannot be subtracted. There is no mask and no dropout.

    Args:
        query: [..., heads, L, d]; key and value [..., heads, S, d] and [..., heads, S, d_v].
        degree: g, of the series of exp; columns are binomial(d + g, g). Even ones keep every weight
            positive.
        is_causal: position i sees j <= i; L is S.
        scale: of the scores; None: 1 / sqrt(d).
        enable_gqa: key and value have fewer heads, each for several of the query's.

    Raises:
        InputError: a head has more than `most_columns` columns, shapes do not go together, or, with
            an odd degree, weights of a row sum to no positive number.

    Source: Hu et al., "Computational Limits of Low-Rank Adaptation (LoRA) Fine-Tuning for
    Transformer Models", arXiv 2406.03136, after Alman and Song, arXiv 2302.13214; the features are
    those of the Taylor series.

    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> q, k, v = (torch.rand(2, 3, 100, 4, dtype=torch.float64) - 0.5 for _ in range(3))
    >>> exact = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> bool((approx_attention(q, k, v, 8, is_causal=True) - exact).abs().max() < 1e-8)
    True
    """
    width = query.shape[-1]
    check_columns(width, degree, most_columns)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    _check_shapes(query, key, value, is_causal)
    kind = torch.promote_types(query.dtype, torch.float32)
    factor = width**-0.5 if scale is None else scale
    q, k, v = query.to(kind) * factor, key.to(kind), value.to(kind)
    out: Tensor = TaylorAttention.apply(q, k, v, degree, is_causal)
    return out.to(query.dtype)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> None:
    same = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if not same or query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        problem = "query, key and value do not go together"
        raise InputError(problem, field="query", value=shapes)
    if is_causal and query.shape[-2] != key.shape[-2]:
        problem = "of a causal attention there are as many keys as queries"
        raise InputError(problem, field="is_causal", value=key.shape[-2])
