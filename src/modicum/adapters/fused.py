"""A frozen linear layer and the low-rank update next to it, as one differentiable operation.

Written apart, the update makes a second output, adds it, and in the backward pass makes and adds a
second input gradient: four passes over memory that cost more than the thin products themselves.
Here both are accumulated in place by the matrix product. What is thin is kept as [r, n]: products
with r long rows stream through memory, products with r columns are up to ten times slower on CPUs.

For the backward pass it keeps x as it was given, so that layers which read one tensor keep it once,
the thin product, and dropout's mask as bits. Nothing else: casts, dropped inputs and the weight of
a quantized layer are made anew. Where A is not trained, x is not kept either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.adapted_layer import AdaptedLayer
from modicum.core.codecs.bit_packing import pack_bits, unpack_bits
from modicum.core.layers.frozen_product import FrozenProduct, frozen_product, weight_of
from modicum.core.torch_private import transforms_run


class _FrozenPlusLowRank(torch.autograd.Function):
    """y = x W^T + b + s (dropout(x) A^T) B^T for x [n, in]; W and b take no gradient.

    Where nothing is held, the update alone.
    """

    # One method does both, as `setup_context` would cost an inspection of its signature a call.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        scale: float,
        dropout: float,
        dtype: torch.dtype,
        form: str,
        columns: int,
        *held: Tensor,
    ) -> Tensor:
        cast, bits = x.to(dtype), None
        if dropout:
            seen, mask = torch.native_dropout(cast, dropout, True)
            thin = a.to(dtype) @ seen.T
            del seen
            bits = pack_bits(mask)
            del mask
        else:
            thin = a.to(dtype) @ cast.T
        ctx.about = scale, dropout, dtype, form, columns, x.dtype
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, a, b, thin, bits, *held)
        ctx.rows = x.shape
        if not held:
            return (thin.T @ b.to(dtype).T).mul_(scale)
        weight = weight_of(form, held, columns, dtype)
        outputs = F.linear(cast, weight, bias if bias is None else bias.to(dtype))
        return outputs.addmm_(thin.T, b.to(dtype).T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, a, b, thin, bits, *held = ctx.saved_tensors
        scale, dropout, dtype, form, columns, given = ctx.about
        of_x, of_a, of_b, *_ = ctx.needs_input_grad
        mask = None if bits is None else unpack_bits(bits, ctx.rows.numel()).view(ctx.rows)
        through = scale if mask is None or dropout == 1 else scale / (1 - dropout)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if x is None:
                raise RuntimeError("an adapter whose A is frozen has no second derivatives")
            weight = weight_of(form, tuple(held), columns, dtype) if of_x and held else None
            gradients = _differentiable(gradient, x, a, b, weight, mask, through, of_x)
            return *gradients, *(None,) * (6 + len(held))
        x_gradient = a_gradient = b_gradient = None
        if of_b:
            b_gradient = (thin @ gradient).mul_(scale).T.to(b.dtype)
        if of_x or of_a:
            thin_gradient = (b.to(dtype).T @ gradient.T).mul_(through)
        if of_a:
            cast = x.to(dtype)
            a_gradient = thin_gradient @ (cast if mask is None else cast * mask)
            a_gradient = a_gradient.to(a.dtype)
        if of_x:
            if held:
                x_gradient = gradient @ weight_of(form, tuple(held), columns, dtype)
            if mask is None and x_gradient is not None:
                x_gradient.addmm_(thin_gradient.T, a.to(dtype))
            else:
                update = thin_gradient.T @ a.to(dtype)
                update = update if mask is None else update.mul_(mask)
                x_gradient = update if x_gradient is None else x_gradient.add_(update)
            x_gradient = x_gradient.to(given)
        return x_gradient, a_gradient, b_gradient, *(None,) * (6 + len(held))


def _differentiable(
    gradient: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    through: float,
    of_x: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same of operations that have gradients themselves, for `create_graph=True`."""
    dtype = gradient.dtype
    seen = x.to(dtype) if mask is None else x.to(dtype) * mask
    thin_gradient = through * (gradient @ b.to(dtype))
    x_gradient = None
    if of_x:
        update = thin_gradient @ a.to(dtype)
        update = update if mask is None else update * mask
        x_gradient = (update if weight is None else update + gradient @ weight).to(x.dtype)
    a_gradient = (thin_gradient.T @ seen).to(a.dtype)
    b_gradient = (through * (gradient.T @ (seen @ a.to(dtype).T))).to(b.dtype)
    return x_gradient, a_gradient, b_gradient


def fusible(base: Callable[[Tensor], Tensor], inputs: Tensor, a: Tensor) -> FrozenProduct | None:
    """The product that `base` computes, where one operation can do that and the update.

    None where it could not: something else stands between (another adapter, a patched forward), the
    layer is trained itself or is no linear one, or the factors are more precise than the inputs.
    """
    layer = getattr(base, "__self__", None)
    if not isinstance(layer, AdaptedLayer) or layer.patched is not None:
        return None
    autocast = torch.is_autocast_enabled(inputs.device.type)
    if not autocast and torch.promote_types(inputs.dtype, a.dtype) != inputs.dtype:
        return None
    return frozen_product(layer)


def plus_low_rank(
    inputs: Tensor,
    base: Callable[[Tensor], Tensor],
    a: Tensor,
    b: Tensor,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """base(inputs) + scale * dropout(inputs) A^T B^T: in one operation where `base` is frozen.

    Args:
        inputs: [..., in].
        base: maps them to [..., out].
        a, b: A [r, in] and B [out, r]; they compute in autocast's dtype, else in the more precise
            one of theirs and the inputs', in which bf16 inputs lose none of the gradients' digits.
        scale: s.
        dropout: the probability; draws as `torch.nn.functional.dropout` does.

    Returns:
        [..., out], in the dtype of what `base` gives.
    """
    dtype = _compute_dtype(inputs, a)
    if not torch.compiler.is_compiling() and transforms_run():
        # A transform of `torch.func`, or forward-mode differentiation, wants plain operations.
        outputs, thin = base(inputs), F.linear(F.dropout(inputs.to(dtype), dropout), a.to(dtype))
        return (outputs + scale * F.linear(thin, b.to(dtype))).to(outputs.dtype)
    product = fusible(base, inputs, a)
    if product is not None:
        return low_rank(inputs, product, a, b, scale, dropout)
    outputs = base(inputs)
    return (outputs + low_rank(inputs, None, a, b, scale, dropout)).to(outputs.dtype)


def low_rank(
    inputs: Tensor,
    product: FrozenProduct | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """scale * dropout(inputs) A^T B^T, and what the product gives; all as in `plus_low_rank`."""
    held: tuple[Tensor, ...] = ()
    form, bias = "", None
    if product is not None:
        held, form, bias = product.held, product.form, product.bias
    rows, dtype = inputs.reshape(-1, inputs.shape[-1]), _compute_dtype(inputs, a)
    outputs: Tensor = _FrozenPlusLowRank.apply(
        rows, a, b, bias, scale, dropout, dtype, form, inputs.shape[-1], *held
    )
    return outputs.view(*inputs.shape[:-1], b.shape[0])


def _compute_dtype(inputs: Tensor, a: Tensor) -> torch.dtype:
    """Autocast's, else the more precise one of theirs."""
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(inputs.dtype, a.dtype)
