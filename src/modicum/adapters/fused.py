"""The frozen linear layer and the low-rank update beside it, as one differentiable operation.

Written apart, the update makes a second output, adds it, and in the backward pass makes and adds a
second input gradient: four passes over memory that cost more than the thin products themselves.
Here both are accumulated in place by the matrix product. What is thin is kept as [r, n]: products
with r long rows stream through memory, products with r columns are up to ten times slower on CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _FrozenLinearPlusLowRank(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T for x [n, in]; W and b take no gradient."""

    # One method does both, as `setup_context` would cost an inspection of its signature a call.
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        thin = a @ x.T
        ctx.scale = scale
        ctx.save_for_backward(x, weight, a, b, thin)
        return F.linear(x, weight, bias).addmm_(thin.T, b.T, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, a, b, thin = ctx.saved_tensors
        thin_gradient = (b.T @ gradient.T).mul_(ctx.scale)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = (gradient @ weight).addmm_(thin_gradient.T, a)
        a_gradient = thin_gradient @ x if ctx.needs_input_grad[3] else None
        b_gradient = (thin @ gradient).mul_(ctx.scale).T if ctx.needs_input_grad[4] else None
        return x_gradient, None, None, a_gradient, b_gradient, None


def frozen_linear_plus_low_rank(
    inputs: Tensor, base: nn.Linear, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    """base(inputs) + scale * inputs A^T B^T, for a base that is not trained.

    Args:
        inputs: [..., in].
        base: the frozen layer, W [out, in].
        a, b: A [r, in] and B [out, r]; they compute in the input's dtype, or autocast's.
        scale: s.

    Returns:
        [..., out].
    """
    device = inputs.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
    bias: Tensor | None = base.bias
    outputs = _FrozenLinearPlusLowRank.apply(
        inputs.to(dtype).reshape(-1, inputs.shape[-1]),
        base.weight.to(dtype),
        bias if bias is None else bias.to(dtype),
        a.to(dtype),
        b.to(dtype),
        scale,
    )
    return outputs.view(*inputs.shape[:-1], base.out_features)
