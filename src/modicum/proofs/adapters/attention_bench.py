"""Heads of one size of entries, exact attention in two forms, and how far gradients of a LoRA are.

Q and K are normal numbers, scaled so that the largest entry of each is Gamma; the scale of the
scores is 1. The gradient that is compared is that of the weight which makes Q out of inputs X:
dW_Q = dQ^T X, of which those of a LoRA's factors are projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from modicum.core.layers.attention_calls import SeenAttention
from modicum.core.layers.taylor_attention import approx_attention
from modicum.core.random import normal_

INPUTS = 16
_CHUNK = 256

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DrawnHead:
    """One head's queries, keys and values [1, 1, L, d], inputs [L, 16] and output's gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    gradient: Tensor

    @property
    def seen(self) -> SeenAttention:
        """What a diagnosis is shown of it."""
        return SeenAttention("head", self.q, self.k, None, causal=False, scale=1.0)

    def weight_gradient(self, attend: Attend) -> Tensor:
        """dW_Q [d, 16] where this computes attention."""
        q = self.q.clone().requires_grad_()
        (dq,) = torch.autograd.grad(attend(q, self.k, self.v), q, self.gradient.to(q.dtype))
        return dq[0, 0].mT @ self.x.to(dq.dtype)

    def error(self, attend: Attend) -> float:
        """The relative error of dW_Q, next to that of exact attention in fp64."""
        true = self.double().weight_gradient(exact)
        return float((self.weight_gradient(attend).double() - true).norm() / true.norm())

    def double(self) -> DrawnHead:
        """The same numbers in fp64."""
        return DrawnHead(*(t.double() for t in (self.q, self.k, self.v, self.x, self.gradient)))


def head(gamma: float, length: int, width: int = 4, seed: int = 0, dtype: Any = None) -> DrawnHead:
    """A head whose largest entries of Q and K are gamma."""
    drawn = []
    for name in ("q", "k", "v", "x", "gradient"):
        shape = (length, INPUTS) if name == "x" else (1, 1, length, width)
        drawn.append(normal_(torch.empty(shape, dtype=torch.float64), seed=seed, name=name))
    for entries in drawn[:2]:
        entries.mul_(gamma / entries.abs().max())
    return DrawnHead(*(tensor.to(dtype or torch.float32) for tensor in drawn))


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with its full matrix of weights."""
    return (q @ k.mT).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """PyTorch's own, which keeps no matrix either."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)


def series_of(degree: int, *, causal: bool = False) -> Attend:
    """The linear path."""
    return lambda q, k, v: approx_attention(q, k, v, degree, is_causal=causal, scale=1.0)


def exact_gradients(
    q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV at these attention weights f [..., rows, S], which is quadratic in the length.

    q' = dO V^T, p = f * q' - diag(rowsum(f * q')) f; dQ = p K, dK = p^T Q, dV = f^T dO.
    """
    products = weights * (gradient @ v.mT)
    p = products - products.sum(-1, keepdim=True) * weights
    return p @ k, p.mT @ q, weights.mT @ gradient


class ChunkedAttention(torch.autograd.Function):
    """Exact attention, some queries at a time, so that memory is linear: a fair baseline of it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.cat([exact(rows, k, v) for rows in q.split(_CHUNK, -2)], -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for rows, given in zip(q.split(_CHUNK, -2), gradient.split(_CHUNK, -2), strict=True):
            weights = (rows @ k.mT).softmax(-1)
            of_rows, of_keys, of_values = exact_gradients(rows, k, v, given, weights)
            dq.append(of_rows)
            dk += of_keys
            dv += of_values
        return torch.cat(dq, -2), dk, dv


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact attention in chunks of queries."""
    out: Tensor = ChunkedAttention.apply(q, k, v)
    return out
