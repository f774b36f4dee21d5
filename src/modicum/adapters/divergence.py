"""How far two passes' distributions over classes are apart, without keeping them.

For the backward pass the logits are kept, which are there anyway. Distributions and gradients are
made of a part of the rows at a time, in both passes: next to logits of a large vocabulary nothing
of their size comes and goes but the gradient. There are as many parts however many rows, so what
comes and goes grows with the rows, as ledgers take it to.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_PARTS = 16


class _Divergence(torch.autograd.Function):
    """Sum over rows of weight (KL(p || q) + KL(q || p)), each with p's, or q's, gradient alone."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(first, second, weights)
        total = weights.new_zeros((), dtype=torch.float32)
        for one, other, weight in _parts(first, second, weights):
            p, q = (F.log_softmax(each.float(), -1) for each in (one, other))
            total += ((p.exp() - q.exp()).mul_(p.sub_(q)).sum(-1) * weight).sum()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        first, second, weights = ctx.saved_tensors
        of_first, of_second = torch.empty_like(first), torch.empty_like(second)
        made = zip(
            _parts(first, second, weights),
            _parts(of_first, of_second, weights),
            strict=True,
        )
        for (one, other, weight), (of_one, of_other, _) in made:
            p, q = (F.log_softmax(each.float(), -1) for each in (one, other))
            apart = p - q
            scale = (weight * gradient).unsqueeze(-1)
            for log, out, sign in ((p, of_one, 1), (q, of_other, -1)):
                share, away = log.exp_(), apart if sign > 0 else -apart
                mean = (share * away).sum(-1, keepdim=True)
                out.copy_((away - mean).mul_(share).mul_(scale))
        return of_first, of_second, None


def _parts(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """A part of the rows of each, the same ones; views."""
    rows = max(1, -(-len(tensors[0]) // _PARTS))
    return list(zip(*(each.split(rows) for each in tensors), strict=True))


def divergence(first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
    """The sum of weight (KL(p || q) + KL(q || p)) over rows, in fp32, one element.

    Either divergence has a gradient by its first distribution alone.

    Args:
        first, second: logits [..., classes] of p and q.
        weights: [...], without a gradient.

    >>> logits = torch.tensor([[0.0, 1.0]])
    >>> divergence(logits, logits, torch.ones(1)).item()
    0.0
    """
    classes = first.shape[-1]
    flat = (each.reshape(-1, classes) for each in (first, second))
    found: Tensor = _Divergence.apply(*flat, weights.reshape(-1))
    return found
