"""The frozen linear layer and the low-rank update next to it, as one differentiable operation.

Written apart, the update makes a second output, adds it, and in the backward pass makes and adds a
second input gradient: four passes over memory that cost more than the thin products themselves.
Here both are accumulated in place by the matrix product. What is thin is kept as [r, n]: products
with r long rows stream through memory, products with r columns are up to ten times slower on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.adapted_layer import AdaptedLayer
from modicum.core.torch_private import is_plain_parameter, transforms_run


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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, a, b, thin = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _differentiable_backward(ctx, gradient, x, weight, a, b)
        thin_gradient = (b.T @ gradient.T).mul_(ctx.scale)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = (gradient @ weight).addmm_(thin_gradient.T, a)
        a_gradient = thin_gradient @ x if ctx.needs_input_grad[3] else None
        b_gradient = (thin @ gradient).mul_(ctx.scale).T if ctx.needs_input_grad[4] else None
        return x_gradient, None, None, a_gradient, b_gradient, None


def _differentiable_backward(
    ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, a: Tensor, b: Tensor
) -> tuple[Any, ...]:
    """The same of operations that have gradients themselves, for `create_graph=True`."""
    thin_gradient = ctx.scale * (gradient @ b)
    x_gradient = gradient @ weight + thin_gradient @ a if ctx.needs_input_grad[0] else None
    a_gradient = thin_gradient.T @ x if ctx.needs_input_grad[3] else None
    b_gradient = ctx.scale * (gradient.T @ (x @ a.T)) if ctx.needs_input_grad[4] else None
    return x_gradient, None, None, a_gradient, b_gradient, None


def fusible(base: Callable[[Tensor], Tensor], inputs: Tensor, a: Tensor) -> nn.Linear | None:
    """The layer whose own product `base` is, where one operation can do that and the update.

    None where it could not: something else stands between (another adapter, a patched forward), the
    layer is no plain `nn.Linear` or is trained itself, a transform of `torch.func` or forward-mode
    differentiation is at work, or the factors are more precise than the inputs.
    """
    layer = getattr(base, "__self__", None)
    if not isinstance(layer, AdaptedLayer) or not isinstance(layer, nn.Linear):
        return None
    if layer.plain_type.forward is not nn.Linear.forward or layer.patched is not None:
        return None
    if not is_plain_parameter(layer.weight) or layer.weight.requires_grad:
        return None
    bias: Tensor | None = layer.bias
    if bias is not None and bias.requires_grad:
        return None
    autocast = torch.is_autocast_enabled(inputs.device.type)
    if not autocast and torch.promote_types(inputs.dtype, a.dtype) != inputs.dtype:
        return None
    if not torch.compiler.is_compiling() and transforms_run():
        return None
    return layer


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
