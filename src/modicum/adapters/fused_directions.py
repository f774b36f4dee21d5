"""A frozen linear layer and an update along fixed directions, as one differentiable operation.

The update is up diag(d) down with d [k] alone trained. Its gradient needs, of a position, the k
numbers that both products meet in, and not the layer's input: d_i gets the sum over positions of
(up_i . dy)(down_i . x). Where there are as many directions as the matrix has rank, the update is
built instead, once a product; then the input is what is kept, which layers that read one tensor
share, and of dropout the mask as bits. What is built is added to the weight, but not with dropout,
nor below fp32, in which the weight would swallow a small change.

A pair of thin matrices may come to it, whose product b a is added to the update, and which take
gradients both; then the input is what is kept in either way, of which the backward pass makes the
numbers between products anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.dropping import drop, mask_of
from modicum.adapters.fused import compute_dtype, fusible
from modicum.adapters.kronecker import folds
from modicum.core.layers.frozen_product import weight_of
from modicum.core.torch_private import transforms_run


class _AlongDirections(torch.autograd.Function):
    """y = x W^T + b + (dropout(x) down^T diag(d)) up^T for x [n, in]; of the rest d has a gradient.

    Where nothing is held, the update alone. With a pair of `low` matrices a [r, in] and b [out, r],
    which have gradients too, (dropout(x) a^T) b^T is added.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        d: Tensor,
        down: Tensor,
        up: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        bias: Tensor | None,
        dropout: float,
        dtype: torch.dtype,
        form: str,
        columns: int,
        *held: Tensor,
    ) -> Tensor:
        cast = x.to(dtype)
        seen, bits = drop(cast, dropout)
        thin = down.to(dtype) @ seen.T
        low = None if a is None else a.to(dtype) @ seen.T
        del seen
        ctx.about = dropout, dtype, form, columns, x.dtype
        kept = (thin, None) if a is None else (None, x)
        ctx.save_for_backward(d, down, up, *kept, bits, a, b, *held)
        scaled = thin * d.to(dtype)[:, None]
        if held:
            weight = weight_of(form, held, columns, dtype)
            outputs = F.linear(cast, weight, bias if bias is None else bias.to(dtype))
            outputs.addmm_(scaled.T, up.to(dtype).T)
        else:
            outputs = scaled.T @ up.to(dtype).T
        return outputs if low is None or b is None else outputs.addmm_(low.T, b.to(dtype).T)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        _no_second_derivatives()
        d, down, up, thin, x, bits, a, b, *held = ctx.saved_tensors
        dropout, dtype, form, columns, given = ctx.about
        of_x, of_d, _, _, of_a, of_b, *_ = ctx.needs_input_grad
        x_gradient = d_gradient = a_gradient = b_gradient = None
        met = up.to(dtype).T @ gradient.T
        of_low: Any = None if a is None else b.to(dtype).T @ gradient.T
        seen: Any = None
        if x is not None:
            seen = _masked(x.to(dtype, copy=bits is not None), bits, dropout)
        if of_d:
            thin = down.to(dtype) @ seen.T if thin is None else thin
            d_gradient = (met * thin).sum(1, dtype=d.dtype)
        if of_b:
            b_gradient = ((a.to(dtype) @ seen.T) @ gradient).T.to(b.dtype)
        if of_a:
            a_gradient = (of_low @ seen).to(a.dtype)
        del seen, thin
        if of_x:
            through = met.mul_(d.to(dtype)[:, None])
            if held:
                x_gradient = gradient @ weight_of(form, tuple(held), columns, dtype)
            if bits is None and x_gradient is not None:
                update = x_gradient.addmm_(through.T, down.to(dtype))
            else:
                update = through.T @ down.to(dtype)
            if a is not None:
                update.addmm_(of_low.T, a.to(dtype))
            if update is not x_gradient:
                update = _masked(update, bits, dropout)
                x_gradient = update if x_gradient is None else x_gradient.add_(update)
            x_gradient = x_gradient.to(given)
        others = (None,) * (5 + len(held))
        return x_gradient, d_gradient, None, None, a_gradient, b_gradient, *others


class _Built(torch.autograd.Function):
    """y = x W^T + b + dropout(x) (up diag(d) down)^T for x [n, in]; of the rest d has a gradient.

    Where the update `folds` into W there is one product. `low` matrices as above.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        d: Tensor,
        down: Tensor,
        up: Tensor,
        a: Tensor | None,
        b: Tensor | None,
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
        if folds(dropout, dtype.itemsize):
            outputs = F.linear(cast, _update(d, down, up, a, b, weight).to(dtype), bias)
        else:
            outputs = F.linear(cast, weight, bias)
            seen, bits = drop(cast, dropout)
            outputs.addmm_(seen, _update(d, down, up, a, b).to(dtype).T)
        ctx.about = dropout, dtype, form, columns
        ctx.save_for_backward(x, d, down, up, a, b, bits, *held)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        _no_second_derivatives()
        x, d, down, up, a, b, bits, *held = ctx.saved_tensors
        dropout, dtype, form, columns = ctx.about
        of_x, of_d, _, _, of_a, of_b, *_ = ctx.needs_input_grad
        x_gradient = d_gradient = a_gradient = b_gradient = None
        if of_d or of_a or of_b:
            seen = _masked(x.to(dtype, copy=bits is not None), bits, dropout)
            of_weight = (gradient.T @ seen).to(up.dtype)
            del seen
        if of_d:
            d_gradient = ((up.T @ of_weight) * down).sum(1, dtype=d.dtype)
        if of_a:
            a_gradient = (b.to(up.dtype).T @ of_weight).to(a.dtype)
        if of_b:
            b_gradient = (of_weight @ a.to(up.dtype).T).to(b.dtype)
        if of_x:
            weight = weight_of(form, tuple(held), columns, dtype)
            if folds(dropout, dtype.itemsize):
                x_gradient = gradient @ _update(d, down, up, a, b, weight).to(dtype)
            else:
                update = _masked(gradient @ _update(d, down, up, a, b).to(dtype), bits, dropout)
                x_gradient = update.addmm_(gradient, weight)
            x_gradient = x_gradient.to(x.dtype)
        others = (None,) * (5 + len(held))
        return x_gradient, d_gradient, None, None, a_gradient, b_gradient, *others


def _update(
    d: Tensor,
    down: Tensor,
    up: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    weight: Tensor | None = None,
) -> Tensor:
    """up diag(d) down + b a, or W and that, summed in the precision of the directions."""
    with torch.autocast(up.device.type, enabled=False):
        scaled = up * d.to(up.dtype)
        made = scaled @ down if weight is None else torch.addmm(weight.to(up.dtype), scaled, down)
        return made if a is None or b is None else made.addmm_(b.to(up.dtype), a.to(up.dtype))


def _masked(made: Tensor, bits: Tensor | None, dropout: float) -> Tensor:
    """A tensor [n, in] as dropout lets it through, in its own memory; without bits, all of it."""
    mask = mask_of(bits, made.shape)
    return made if mask is None else made.mul_(mask).div_(1.0 if dropout == 1 else 1 - dropout)


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
    low: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """base(inputs) + dropout(inputs) (up diag(d) down)^T: one operation where `base` is frozen.

    Args:
        inputs: [..., in].
        base: maps them to [..., out].
        d, down, up: [k], [k, in] and [out, k], the latter two without gradients; they compute in
            autocast's dtype, else in the more precise one of theirs and the inputs'.
        dropout: the probability; draws as `torch.nn.functional.dropout` does.
        built: whether the update is made once a product, [out, in], and x is what is kept.
        low: a [r, in] and b [out, r] with gradients: the update is up diag(d) down + b a.

    Returns:
        [..., out], in the dtype of what `base` gives.
    """
    rows, dtype = inputs.reshape(-1, inputs.shape[-1]), compute_dtype(inputs, d)
    if not torch.compiler.is_compiling() and transforms_run():
        # A transform of `torch.func`, or forward-mode differentiation, wants plain operations.
        there, seen = base(inputs), F.dropout(inputs.to(dtype), dropout)
        update = F.linear(F.linear(seen, down.to(dtype)) * d.to(dtype), up.to(dtype))
        if low is not None:
            update = update + F.linear(F.linear(seen, low[0].to(dtype)), low[1].to(dtype))
        return (there + update).to(there.dtype)
    a, b = (None, None) if low is None else low
    columns, product = inputs.shape[-1], fusible(base, inputs, d)
    outputs: Tensor
    if product is None:
        there = base(inputs)
        outputs = _AlongDirections.apply(rows, d, down, up, a, b, None, dropout, dtype, "", columns)
        return (there + outputs.view(*inputs.shape[:-1], len(up))).to(there.dtype)
    computed = _Built if built else _AlongDirections
    about = product.bias, dropout, dtype, product.form, columns
    outputs = computed.apply(rows, d, down, up, a, b, *about, *product.held)
    return outputs.view(*inputs.shape[:-1], len(up))


def operations(
    positions: int, count: int, shape: tuple[int, int], low: int = 0, *, built: bool, folds: bool
) -> tuple[int, int]:
    """Operations forward and backward beyond the frozen product's, with a gradient of x.

    Args:
        count: k, the directions.
        shape: of the weight, out and in.
        low: r, of the pair of thin matrices.
        folds: whether what is built is added to the weight.
    """
    outs, ins = shape
    if not built:
        forward = 2 * positions * (count + low) * (outs + ins)
        again = 2 * positions * (count + low) * ins if low else 0
        return forward, forward + 2 * positions * low * (outs + ins) + again
    apart = 0 if folds else positions  # next to the base's own product
    forward = 2 * outs * ins * (count + low + apart)
    return forward, 2 * outs * ins * (positions + apart + 2 * count + 3 * low)
