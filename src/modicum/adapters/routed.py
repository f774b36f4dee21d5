"""The thin product of an adapter whose tokens use few of its ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def routed(u: Tensor, b: Tensor, chosen: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """s (u restricted to `chosen`) B^T, [n, m]; k numbers and places of a row are kept.

    Args:
        u: [n, r]; `b`: B [m, r]; `chosen`: places [n, k] of the ranks that each row uses.
        dtype: of the product.
    """
    outputs: Tensor = _Routed.apply(u, b, chosen, scale, dtype)
    return outputs


def spread(values: Tensor, chosen: Tensor, rank: int) -> Tensor:
    """[n, rank] with the values [n, k] at their places, and zeros.

    >>> spread(torch.tensor([[5.0, 7.0]]), torch.tensor([[2, 0]]), 3)
    tensor([[7., 0., 5.]])
    """
    return values.new_zeros(len(values), rank).scatter(1, chosen, values)


def place_dtype(rank: int) -> torch.dtype:
    """The dtype that places among so many ranks are kept in."""
    return torch.uint8 if rank <= 256 else torch.int32


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Tensor, b: Tensor, chosen: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        values = u.gather(1, chosen).to(dtype)
        ctx.save_for_backward(values, chosen.to(place_dtype(b.shape[1])), b)
        ctx.about = scale, dtype, u.dtype
        return (spread(values, chosen, b.shape[1]) @ b.to(dtype).T).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, places, b = ctx.saved_tensors
        scale, dtype, given = ctx.about
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("an adapter whose A is frozen has no second derivatives")
        chosen, of_u, of_b = places.long(), None, None
        if ctx.needs_input_grad[1]:
            of_b = (gradient.T @ spread(values, chosen, b.shape[1])).mul_(scale).to(b.dtype)
        if ctx.needs_input_grad[0]:
            through = (gradient @ b.to(dtype)).mul_(scale).gather(1, chosen)
            of_u = spread(through.to(given), chosen, b.shape[1])
        return of_u, of_b, None, None, None
