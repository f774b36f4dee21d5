"""A frozen linear layer and the low-rank update next to it, as one differentiable operation.

Written apart, the update makes a second output, adds it, and in the backward pass makes and adds a
second input gradient: four passes over memory that cost more than the thin products themselves.
Here both are accumulated in place by the matrix product. What is thin is kept as [r, n]: products
with r long rows stream through memory, products with r columns are up to ten times slower on CPUs.

For the backward pass it keeps x as it was given, so that layers which read one tensor keep it once,
the thin product, and dropout's mask as bits. Nothing else: casts, dropped inputs and the weight of
a quantized layer are made anew. Where A is not trained, x is not kept either. Where A reads sums of
channels, it keeps these in place of x, which are fewer; with dropout they are made anew of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters import dropping
from modicum.adapters.adapted_layer import AdaptedLayer
from modicum.adapters.channel_sums import ChannelSums
from modicum.core.layers.frozen_product import (
    NO_PRODUCT,
    FrozenProduct,
    frozen_product,
    weight_of,
)
from modicum.core.torch_private import transforms_run

# What is before A and after B: sums of channels, and sums whose transpose copies.
Maps = tuple[ChannelSums | None, ChannelSums | None]
PLAIN: Maps = (None, None)


class _FrozenPlusLowRank(torch.autograd.Function):
    """y = x W^T + b + s (dropout(x) A^T) B^T for x [n, in]; W and b take no gradient.

    With maps, y = x W^T + b + s T^T(B A S(dropout(x))) for sums S before A and copies T^T after B.
    `sums` are S(x) where there is no dropout, x is not needed for anything but W then. Without B
    what A gives is copied. Where nothing is held, the update alone.
    """

    # One method does both, as `setup_context` would cost an inspection of its signature a call.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor | None,
        sums: Tensor | None,
        bias: Tensor | None,
        scale: float,
        dropout: float,
        maps: Maps,
        dtype: torch.dtype,
        form: str,
        columns: int,
        seen: Tensor | None,
        bits: Tensor | None,
        middle: Tensor | None,
        *held: Tensor,
    ) -> Tensor:
        cast = x.to(dtype)
        before, after = maps
        if seen is not None:
            thin = a.to(dtype) @ (seen if before is None else before.sums(seen)).T
        elif dropout:
            made, bits = dropping.drop(cast, dropout)
            thin = a.to(dtype) @ (made if before is None else before.sums(made)).T
            del made
        else:
            thin = a.to(dtype) @ (cast if sums is None else sums.to(dtype)).T
        ctx.about = scale, dropout, maps, dtype, form, columns, x.dtype
        read = x if sums is None else sums
        kept = None if b is None else thin
        wanted = read if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(wanted, a, b, kept, bits, middle, *held)
        ctx.rows = x.shape
        if b is not None and middle is not None:
            b = _product(b, middle, dtype)
        if held:
            weight = weight_of(form, held, columns, dtype)
            outputs = F.linear(cast, weight, bias if bias is None else bias.to(dtype))
            if after is None and b is not None:
                return outputs.addmm_(thin.T, b.to(dtype).T, alpha=scale)
        update = thin.T if b is None else thin.T @ b.to(dtype).T
        if held:
            if after is None:
                return outputs.add_(update, alpha=scale)
            return after.add_copies(outputs, update, scale)
        update = update * scale if b is None else update.mul_(scale)
        return update if after is None else after.copies(update)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        read, a, b, thin, bits, middle, *held = ctx.saved_tensors
        scale, dropout, (before, after), dtype, form, columns, given = ctx.about
        of_x, of_a, of_b, of_sums, *_ = ctx.needs_input_grad
        of_middle = middle is not None and ctx.needs_input_grad[13]
        outer = b
        b = b if middle is None else _product(b, middle, dtype)
        mask = dropping.mask_of(bits, ctx.rows)
        through = scale if mask is None or dropout == 1 else scale / (1 - dropout)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if read is None:
                raise RuntimeError("an adapter whose A is frozen has no second derivatives")
            weight = weight_of(form, tuple(held), columns, dtype) if of_x and held else None
            maps, of = (before, after), (of_x, of_sums)
            gradients = _differentiable(gradient, read, a, b, weight, mask, through, maps, of)
            return *gradients, *(None,) * (10 + len(held))
        x_gradient = a_gradient = b_gradient = sums_gradient = middle_gradient = None
        # Those of x come by way of the sums where these were given.
        of_read = of_x and (before is None or mask is not None)
        up = gradient if after is None else after.sums(gradient)
        if of_b:
            b_gradient = (thin @ up).mul_(scale).T.to(b.dtype)
        if of_middle:
            of_product = (thin @ up).mul_(scale)
            middle_gradient = (of_product @ outer.to(dtype)).T.to(middle.dtype)
        if of_read or of_a or of_sums:
            thin_gradient = up.T * through if b is None else (b.to(dtype).T @ up.T).mul_(through)
        if of_a:
            seen = read.to(dtype)
            seen = seen if mask is None else seen * mask
            seen = before.sums(seen) if before is not None and mask is not None else seen
            a_gradient = (thin_gradient @ seen).to(a.dtype)
            del seen  # before other tensors of its size are made
        if of_sums:
            sums_gradient = (thin_gradient.T @ a.to(dtype)).to(given)
        if of_x and held:
            x_gradient = gradient @ weight_of(form, tuple(held), columns, dtype)
        if of_read:
            if mask is None and x_gradient is not None:
                x_gradient.addmm_(thin_gradient.T, a.to(dtype))
            else:
                update = thin_gradient.T @ a.to(dtype)
                update = update if before is None else before.copies(update)
                update = update if mask is None else update.mul_(mask)
                x_gradient = update if x_gradient is None else x_gradient.add_(update)
        x_gradient = None if x_gradient is None else x_gradient.to(given)
        others = *(None,) * 9, middle_gradient, *(None,) * len(held)
        return x_gradient, a_gradient, b_gradient, sums_gradient, *others


def _product(b: Tensor, middle: Tensor, dtype: torch.dtype) -> Tensor:
    return b.to(dtype) @ middle.to(dtype)


def _differentiable(
    gradient: Tensor,
    read: Tensor,
    a: Tensor,
    b: Tensor | None,
    weight: Tensor | None,
    mask: Tensor | None,
    through: float,
    maps: Maps,
    of: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """The same of operations that have gradients themselves, for `create_graph=True`."""
    (before, after), (of_x, of_sums), dtype = maps, of, gradient.dtype
    summed = before is not None and mask is None
    seen = read.to(dtype) if mask is None else read.to(dtype) * mask
    seen = before.sums(seen) if before is not None and not summed else seen
    up = gradient if after is None else after.sums(gradient)
    thin_gradient = through * (up if b is None else up @ b.to(dtype))
    x_gradient = gradient @ weight if of_x and weight is not None else None
    sums_gradient = (thin_gradient @ a.to(dtype)).to(read.dtype) if of_sums else None
    if of_x and not summed:
        update = thin_gradient @ a.to(dtype)
        update = update if before is None else before.copies(update)
        update = update if mask is None else update * mask
        x_gradient = update if x_gradient is None else update + x_gradient
    x_gradient = None if x_gradient is None else x_gradient.to(read.dtype)
    a_gradient = (thin_gradient.T @ seen).to(a.dtype)
    b_gradient = None
    if b is not None:
        b_gradient = (through * (up.T @ (seen @ a.to(dtype).T))).to(b.dtype)
    return x_gradient, a_gradient, b_gradient, sums_gradient


def fusible(base: Callable[[Tensor], Tensor], inputs: Tensor, a: Tensor) -> FrozenProduct | None:
    """The product that `base` computes, where one operation can do that and the update.

    None where it could not: something else stands between (another adapter, a patched forward), the
    layer is trained itself, has copies that are or a patch, or is no linear one, or the factors are
    more precise than the inputs.
    """
    layer = getattr(base, "__self__", None)
    if not isinstance(layer, AdaptedLayer) or layer.patched is not None or layer.copies():
        return None
    if layer.patches():
        return None
    autocast = torch.is_autocast_enabled(inputs.device.type)
    if not autocast and torch.promote_types(inputs.dtype, a.dtype) != inputs.dtype:
        return None
    return frozen_product(layer)


def plus_low_rank(
    inputs: Tensor,
    base: Callable[[Tensor], Tensor],
    a: Tensor,
    b: Tensor | None,
    scale: float,
    dropout: float = 0.0,
    maps: Maps = PLAIN,
    middle: Tensor | None = None,
) -> Tensor:
    """base(inputs) + scale * dropout(inputs) A^T B^T: in one operation where `base` is frozen.

    Args:
        inputs: [..., in].
        base: maps them to [..., out].
        a, b: A [r, in] and B [out, r], or None, then A is [out, in]; they compute in autocast's
            dtype, else in the more precise one of theirs and the inputs', in which bf16 inputs lose
            none of the gradients' digits.
        scale: s.
        dropout: the probability; draws as `torch.nn.functional.dropout` does.
        maps: sums of channels that A reads, then A is [r, in / parts], and sums whose transpose
            copies what B gives, then B is [out / parts, r]; None: every channel by itself.
        middle: R [r, r], where B R replaces B, whose product is made anew in the backward pass.
            Then A and B take no gradient.

    Returns:
        [..., out], in the dtype of what `base` gives.
    """
    if not torch.compiler.is_compiling() and transforms_run():
        # A transform of `torch.func`, or forward-mode differentiation, wants plain operations.
        outputs = base(inputs)
        return (outputs + _plain(inputs, a, b, scale, dropout, maps, middle)).to(outputs.dtype)
    product = fusible(base, inputs, a)
    if product is not None:
        return low_rank(inputs, product, a, b, scale, dropout, maps, middle=middle)
    outputs = base(inputs)
    update = low_rank(inputs, None, a, b, scale, dropout, maps, middle=middle)
    return (outputs + update).to(outputs.dtype)


def low_rank(
    inputs: Tensor,
    product: FrozenProduct | None,
    a: Tensor,
    b: Tensor | None,
    scale: float,
    dropout: float = 0.0,
    maps: Maps = PLAIN,
    dropped: tuple[Tensor, Tensor] | None = None,
    middle: Tensor | None = None,
) -> Tensor:
    """scale * dropout(inputs) A^T B^T, and what the product gives; all as in `plus_low_rank`.

    Args:
        dropped: dropout(inputs) and its mask as bits, where they are there; they are used then.
    """
    alone = product is None and dropped is None
    if alone and not torch.compiler.is_compiling() and transforms_run():
        return _plain(inputs, a, b, scale, dropout, maps, middle)
    frozen = product or NO_PRODUCT
    rows, dtype = inputs.reshape(-1, inputs.shape[-1]), compute_dtype(inputs, a)
    before, after = maps
    sums = None
    if before is not None and not dropout:
        sums = before.once(inputs).reshape(-1, a.shape[1])
    columns, seen, bits = inputs.shape[-1], None, None
    if dropped is not None:
        seen, bits = dropped[0].detach().reshape(rows.shape).to(dtype), dropped[1]
    about = scale, dropout, maps, dtype, frozen.form, columns
    outputs: Tensor = _FrozenPlusLowRank.apply(
        rows, a, b, sums, frozen.bias, *about, seen, bits, middle, *frozen.held
    )
    width = (a if b is None else b).shape[0] * (1 if after is None else after.parts)
    return outputs.view(*inputs.shape[:-1], width)


def plus_dropped_between(
    inputs: Tensor,
    base: Callable[[Tensor], Tensor],
    a: Tensor,
    b: Tensor,
    scale: float,
    dropout: float,
    shift: Tensor | None = None,
) -> Tensor:
    """base(inputs) + scale * dropout(inputs A^T + shift) B^T, which keeps a bit a dropped number.

    Args:
        shift: [r]; the others as in `plus_low_rank`.
    """
    outputs, thin = base(inputs), low_rank(inputs, None, a, None, 1.0)
    thin = thin if shift is None else thin + shift.to(thin.dtype)
    update = low_rank(dropping.dropped(thin, dropout), None, b, None, scale)
    return (outputs + update).to(outputs.dtype)


def next_to_frozen(
    inputs: Tensor,
    base: Callable[[Tensor], Tensor],
    a: Tensor,
    compute: Callable[[Tensor, FrozenProduct], Tensor],
) -> Tensor:
    """base(inputs) and an update: as one operation where `base` is frozen, else as their sum.

    Args:
        inputs: [..., in].
        a: one of the tensors that the update is made of.
        compute: of rows [n, in] and a frozen product, what that gives and the update, [n, out]; the
            update alone of `NO_PRODUCT`.
    """
    product = fusible(base, inputs, a)
    outputs = compute(inputs.reshape(-1, inputs.shape[-1]), product or NO_PRODUCT)
    outputs = outputs.view(*inputs.shape[:-1], outputs.shape[-1])
    if product is not None:
        return outputs
    frozen = base(inputs)
    return (frozen + outputs).to(frozen.dtype)


def in_autocast(made: Tensor) -> Tensor:
    """A matrix made of factors, in autocast's dtype: what products keep of it is half as large."""
    kind = made.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return made.to(torch.get_autocast_dtype(kind))
    return made


def _plain(
    inputs: Tensor,
    a: Tensor,
    b: Tensor | None,
    scale: float,
    dropout: float,
    maps: Maps,
    middle: Tensor | None,
) -> Tensor:
    """The update of ordinary operations."""
    (before, after), dtype = maps, compute_dtype(inputs, a)
    b = b if b is None or middle is None else _product(b, middle, dtype)
    seen = F.dropout(inputs.to(dtype), dropout)
    update = F.linear(seen if before is None else before.sums(seen), a.to(dtype))
    update = update if b is None else F.linear(update, b.to(dtype))
    return scale * (update if after is None else after.copies(update))


def compute_dtype(inputs: Tensor, a: Tensor) -> torch.dtype:
    """Autocast's, else the more precise one of theirs."""
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(inputs.dtype, a.dtype)
