"""A frozen linear layer and an update along fixed directions, as one differentiable operation.

The update is up diag(d) down with d [k] alone trained. Its gradient needs, of a position, the k
numbers that both products meet in, and not the layer's input: d_i gets the sum over positions of
(up_i . dy)(down_i . x). Where there are as many directions as the matrix has rank, the update is
built instead, once a product; then the input is what is kept, which layers that read one tensor
share, and of dropout the mask as bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.fused import fusible
from modicum.core.codecs.bit_packing import pack_bits, unpack_bits
from modicum.core.layers.frozen_product import weight_of
from modicum.core.torch_private import transforms_run


class _AlongDirections(torch.autograd.Function):
    """y = x W^T + b + (dropout(x) down^T diag(d)) up^T for x [n, in]; of the rest d has a gradient.

    Where nothing is held, the update alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        d: Tensor,
        down: Tensor,
        up: Tensor,
        bias: Tensor | None,
        dropout: float,
        dtype: torch.dtype,
        form: str,
        columns: int,
        *held: Tensor,
    ) -> Tensor:
        cast, bits = x.to(dtype), None
        if dropout:
            seen, mask = torch.native_dropout(cast, dropout, True)
            thin = down.to(dtype) @ seen.T
            del seen
            bits = pack_bits(mask)
            del mask
        else:
            thin = down.to(dtype) @ cast.T
        ctx.about = dropout, dtype, form, columns, x.dtype
        ctx.save_for_backward(d, down, up, thin, bits, *held)
        scaled = thin * d.to(dtype)[:, None]
        if not held:
            return scaled.T @ up.to(dtype).T
        weight = weight_of(form, held, columns, dtype)
        outputs = F.linear(cast, weight, bias if bias is None else bias.to(dtype))
        return outputs.addmm_(scaled.T, up.to(dtype).T)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        _no_second_derivatives()
        d, down, up, thin, bits, *held = ctx.saved_tensors
        dropout, dtype, form, columns, given = ctx.about
        of_x, of_d, *_ = ctx.needs_input_grad
        x_gradient = d_gradient = None
        met = up.to(dtype).T @ gradient.T
        if of_d:
            d_gradient = (met * thin).sum(1, dtype=d.dtype)
        if of_x:
            through = met.mul_(d.to(dtype)[:, None])
            if held:
                x_gradient = gradient @ weight_of(form, tuple(held), columns, dtype)
            if bits is None and x_gradient is not None:
                x_gradient.addmm_(through.T, down.to(dtype))
            else:
                update = _masked(through.T @ down.to(dtype), bits, dropout)
                x_gradient = update if x_gradient is None else x_gradient.add_(update)
            x_gradient = x_gradient.to(given)
        return x_gradient, d_gradient, *(None,) * (7 + len(held))


class _Built(torch.autograd.Function):
    """y = x W^T + b + dropout(x) (up diag(d) down)^T for x [n, in]; of the rest d has a gradient.

    Without dropout the update is added to W, and there is one product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        d: Tensor,
        down: Tensor,
        up: Tensor,
        bias: Tensor | None,
        dropout: float,
        dtype: torch.dtype,
        form: str,
        columns: int,
        *held: Tensor,
    ) -> Tensor:
        cast, bits = x.to(dtype), None
        weight = weight_of(form, held, columns, dtype)
        bias = bias if bias is None else bias.to(dtype)
        if dropout:
            outputs = F.linear(cast, weight, bias)
            seen, mask = torch.native_dropout(cast, dropout, True)
            outputs.addmm_(seen, _update(d, down, up).to(dtype).T)
            bits = pack_bits(mask)
        else:
            outputs = F.linear(cast, _update(d, down, up, weight).to(dtype), bias)
        ctx.about = dropout, dtype, form, columns
        ctx.save_for_backward(x, d, down, up, bits, *held)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        _no_second_derivatives()
        x, d, down, up, bits, *held = ctx.saved_tensors
        dropout, dtype, form, columns = ctx.about
        of_x, of_d, *_ = ctx.needs_input_grad
        x_gradient = d_gradient = None
        if of_d:
            seen = _masked(x.to(dtype, copy=bits is not None), bits, dropout)
            of_weight = (gradient.T @ seen).to(up.dtype)
            del seen
            d_gradient = ((up.T @ of_weight) * down).sum(1, dtype=d.dtype)
        if of_x:
            weight = weight_of(form, tuple(held), columns, dtype)
            if bits is None:
                x_gradient = gradient @ _update(d, down, up, weight).to(dtype)
            else:
                update = _masked(gradient @ _update(d, down, up).to(dtype), bits, dropout)
                x_gradient = update.addmm_(gradient, weight)
            x_gradient = x_gradient.to(x.dtype)
        return x_gradient, d_gradient, *(None,) * (7 + len(held))


def _update(d: Tensor, down: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    """up diag(d) down, or W and that, summed in the precision of the directions."""
    scaled = up * d.to(up.dtype)
    return scaled @ down if weight is None else torch.addmm(weight.to(up.dtype), scaled, down)


def _masked(made: Tensor, bits: Tensor | None, dropout: float) -> Tensor:
    """A tensor [n, in] as dropout lets it through, in its own memory; without bits, all of it."""
    if bits is None:
        return made
    mask = unpack_bits(bits, made.numel()).view(made.shape)
    return made.mul_(mask).div_(1.0 if dropout == 1 else 1 - dropout)


def _no_second_derivatives() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("an adapter along fixed directions has no second derivatives")


def plus_directions(
    inputs: Tensor,
    base: Callable[[Tensor], Tensor],
    d: Tensor,
    down: Tensor,
    up: Tensor,
    dropout: float = 0.0,
    *,
    built: bool = False,
) -> Tensor:
    """base(inputs) + dropout(inputs) (up diag(d) down)^T: one operation where `base` is frozen.

    Args:
        inputs: [..., in].
        base: maps them to [..., out].
        d, down, up: [k], [k, in] and [out, k], the latter two without gradients; they compute in
            autocast's dtype, else in the more precise one of theirs and the inputs'.
        dropout: the probability; draws as `torch.nn.functional.dropout` does.
        built: whether the update is made once a product, [out, in], and x is what is kept.

    Returns:
        [..., out], in the dtype of what `base` gives.
    """
    kind, rows = inputs.device.type, inputs.reshape(-1, inputs.shape[-1])
    dtype = torch.promote_types(inputs.dtype, d.dtype)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    if not torch.compiler.is_compiling() and transforms_run():
        # A transform of `torch.func`, or forward-mode differentiation, wants plain operations.
        there = base(inputs)
        thin = F.linear(F.dropout(inputs.to(dtype), dropout), down.to(dtype)) * d.to(dtype)
        return (there + F.linear(thin, up.to(dtype))).to(there.dtype)
    columns, product = inputs.shape[-1], fusible(base, inputs, d)
    outputs: Tensor
    if product is None:
        there = base(inputs)
        outputs = _AlongDirections.apply(rows, d, down, up, None, dropout, dtype, "", columns)
        return (there + outputs.view(*inputs.shape[:-1], len(up))).to(there.dtype)
    computed = _Built if built else _AlongDirections
    outputs = computed.apply(
        rows, d, down, up, product.bias, dropout, dtype, product.form, columns, *product.held
    )
    return outputs.view(*inputs.shape[:-1], len(up))
