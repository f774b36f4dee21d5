"""A change of a frozen layer that has no thin form: built of trained tensors, once a pass.

A rule builds the change D [out, in] of small tensors, in ways that no two thin products can do. It
is added to the weight for one product of both, where nothing is lost by that. For the backward pass
x is kept as it was given, dropout's mask as bits, and the few numbers that a rule asks for; D and
its gradient are made there, so nothing of a matrix's size is kept between the passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.dropping import drop, drop_again, mask_of
from modicum.adapters.fused import compute_dtype, next_to_frozen
from modicum.adapters.kronecker import folds
from modicum.core.layers.frozen_product import FrozenProduct, weight_of
from modicum.core.torch_private import transforms_run

Gradients = tuple[Tensor | None, ...]


class BuiltRule(ABC):
    """How D is built of tensors, and what comes back to these."""

    @abstractmethod
    def built(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """D [out, in], of operations that have gradients; and a few numbers for `again`."""

    @abstractmethod
    def again(self, tensors: Sequence[Tensor], known: Tensor) -> tuple[Tensor, Any]:
        """D once more, and for `gradients` what of its making these need."""

    @abstractmethod
    def gradients(self, tensors: Sequence[Tensor], made: Any, of_change: Tensor) -> Gradients:
        """Those of the tensors, where D has the gradient `of_change`, which may be overwritten."""


def forward_work(positions: int, ins: int, outs: int, *, folds: bool) -> int:
    """Operations beyond the frozen product's, and beyond making D."""
    return 0 if folds else 2 * positions * ins * outs


def backward_work(positions: int, ins: int, outs: int, *, folds: bool) -> int:
    """The same of the backward pass, with a gradient of x."""
    return 2 * positions * ins * outs * (1 if folds else 2)


class _FrozenPlusBuilt(torch.autograd.Function):
    """y = x W^T + b + (rows * dropout(x)) D^T for x [n, in]; W and b take no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rule: BuiltRule,
        dropout: float,
        rows: Tensor | None,
        dtype: torch.dtype,
        bias: Tensor | None,
        form: str,
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
        own, held = tensors[:count], tensors[count:]
        cast = x.to(dtype)
        seen, bits = drop(cast, dropout)
        seen = seen if rows is None else seen * rows
        with torch.autocast(x.device.type, enabled=False):
            change, known = rule.built(own)
        change = change.to(dtype)
        ctx.about = rule, dropout, dtype, form, count, _folds(bits, rows, dtype)
        ctx.save_for_backward(x, bits, rows, known, *tensors)
        if not held:
            return F.linear(seen, change)
        weight = weight_of(form, held, x.shape[-1], dtype)
        offset = bias if bias is None else bias.to(dtype)
        if _folds(bits, rows, dtype):
            return F.linear(cast, change.add_(weight), offset)
        return F.linear(cast, weight, offset).addmm_(seen, change.T)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("an adapter that builds its change anew has no second derivatives")
        x, bits, rows, known, *tensors = ctx.saved_tensors
        rule, dropout, dtype, form, count, folded = ctx.about
        own, held = tensors[:count], tuple(tensors[count:])
        mask = mask_of(bits, x.shape)
        seen = drop_again(x.to(dtype, copy=mask is not None), mask, dropout)
        seen = seen if rows is None else seen * rows
        of_change = gradient.T @ seen
        del seen
        with torch.autocast(x.device.type, enabled=False):
            change, made = rule.again(own, known)
            x_gradient = None
            if ctx.needs_input_grad[0]:
                change = change.to(dtype)
                weight = weight_of(form, held, x.shape[-1], dtype) if held else None
                if folded and weight is not None:
                    x_gradient = gradient @ change.add_(weight)
                else:
                    x_gradient = gradient @ change
                    x_gradient = x_gradient if rows is None else x_gradient.mul_(rows)
                    x_gradient = drop_again(x_gradient, mask, dropout)
                    if weight is not None:
                        x_gradient.addmm_(gradient, weight)
                x_gradient = x_gradient.to(x.dtype)
            del change
            found = rule.gradients(own, made, of_change)
        cast = (None if g is None else g.to(t.dtype) for g, t in zip(found, own, strict=True))
        return x_gradient, *(None,) * 7, *cast, *(None,) * len(held)


def _folds(bits: Tensor | None, rows: Tensor | None, dtype: torch.dtype) -> bool:
    return rows is None and folds(0.0 if bits is None else 1.0, dtype.itemsize)


def plus_built(
    inputs: Tensor,
    base: Callable[[Tensor], Tensor],
    rule: BuiltRule,
    tensors: Sequence[Tensor],
    *,
    dropout: float = 0.0,
    rows: Tensor | None = None,
) -> Tensor:
    """base(inputs) + (rows * dropout(inputs)) D^T, in one operation where `base` is a frozen one.

    Args:
        inputs: [..., in].
        tensors: of which the rule builds D; products compute in autocast's dtype, else in the more
            precise one of theirs and the inputs'.
        rows: what each row of the inputs is multiplied with for D, and not for the base, such as
            drop path: as `inputs`, with 1 in place of `in`.
    """
    dtype = compute_dtype(inputs, tensors[0])
    if not torch.compiler.is_compiling() and transforms_run():
        frozen, seen = base(inputs), F.dropout(inputs.to(dtype), dropout)
        seen = seen if rows is None else seen * rows
        return (frozen + F.linear(seen, rule.built(tensors)[0].to(dtype))).to(frozen.dtype)
    flat = None if rows is None else rows.reshape(-1, 1).to(dtype)

    def both(each: Tensor, frozen: FrozenProduct) -> Tensor:
        about = rule, dropout, flat, dtype, frozen.bias, frozen.form, len(tensors)
        made: Tensor = _FrozenPlusBuilt.apply(each, *about, *tensors, *frozen.held)
        return made

    return next_to_frozen(inputs, base, tensors[0], both)
