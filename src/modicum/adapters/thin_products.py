"""A change of a frozen layer that two matrices make, factored or built, whichever is less work.

The change is U D with D [k, in] and U [out, k], one of them frozen, the other made anew of trained
tensors. Where k is as large as the layer, two thin products cost more than the layer itself; for
many positions it is less work to build U D once and add it to the weight; with dropout, and below
fp32, in which the weight would swallow a small change, it has a product of its own. Nothing of the
size of a matrix is kept for the backward pass: there both are made anew of x and the trained
tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.dropping import drop, drop_again, mask_of
from modicum.adapters.fused import compute_dtype, next_to_frozen
from modicum.adapters.kronecker import folds
from modicum.core.layers.frozen_product import FrozenProduct, weight_of
from modicum.core.torch_private import transforms_run

TrainedSide = Literal["down", "up"]


class ThinRule(ABC):
    """How D and U are made of tensors, and what comes back to these.

    Attributes:
        side: which of the two is trained; the other takes no gradient.
        keeps_input: whether x is kept where x D^T would do, which is smaller if `side` is `up`.
    """

    side: TrainedSide
    keeps_input: bool = True

    @abstractmethod
    def matrices(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """D [k, in] and U [out, k]."""

    @abstractmethod
    def gradients(self, tensors: Sequence[Tensor], of_side: Tensor) -> tuple[Tensor | None, ...]:
        """Those of the tensors, where the trained matrix has the gradient `of_side`."""


def forward_work(positions: int, k: int, ins: int, outs: int, *, built: bool, folds: bool) -> int:
    """Operations beyond the frozen product; `folds` where one product does both."""
    if not built:
        return 2 * positions * k * (ins + outs)
    return 2 * ins * outs * (k + (0 if folds else positions))


def backward_work(
    positions: int,
    k: int,
    ins: int,
    outs: int,
    side: TrainedSide,
    *,
    built: bool,
    folds: bool,
    keeps_input: bool,
) -> int:
    """Operations beyond the frozen product's, with a gradient of x."""
    if built:
        return 2 * ins * outs * (2 * k + positions * (1 if folds else 2))
    of_side = ins if side == "down" else outs + (ins if keeps_input else 0)
    return 2 * positions * k * (ins + outs + of_side)


class _FrozenPlusThin(torch.autograd.Function):
    """y = x W^T + b + dropout(x) (U D)^T for x [n, in]; W and b take no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rule: ThinRule,
        built: bool,
        dropout: float,
        dtype: torch.dtype,
        bias: Tensor | None,
        form: str,
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
        own, held = tensors[:count], tensors[count:]
        cast = x.to(dtype)
        seen, bits = drop(cast, dropout)
        down, up = rule.matrices([tensor.to(dtype) for tensor in own])
        offset = bias if bias is None else bias.to(dtype)
        weight = weight_of(form, held, x.shape[-1], dtype) if held else None
        thin = None
        if built:
            if weight is None:
                outputs = F.linear(seen, up @ down)
            elif folds(dropout, dtype.itemsize):
                outputs = F.linear(cast, torch.addmm(weight, up, down), offset)
            else:
                outputs = F.linear(cast, weight, offset).addmm_(seen, (up @ down).T)
        else:
            thin = seen @ down.T
            if weight is None:
                outputs = thin @ up.T
            else:
                outputs = F.linear(cast, weight, offset).addmm_(thin, up.T)
        ctx.about = rule, built, dropout, dtype, form, count, x.dtype, x.shape
        thin = None if built or rule.keeps_input or rule.side == "down" else thin
        ctx.save_for_backward(x if thin is None else None, thin, bits, *tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("an adapter that makes its matrices anew has no second derivatives")
        saved: tuple[Any, ...] = ctx.saved_tensors
        x, thin, bits, *tensors = saved
        rule, built, dropout, dtype, form, count, given, rows = ctx.about
        own, held = tensors[:count], tuple(tensors[count:])
        down, up = rule.matrices([tensor.to(dtype) for tensor in own])
        mask = mask_of(bits, rows)
        seen: Any = None
        if x is not None:
            seen = drop_again(x.to(dtype, copy=mask is not None), mask, dropout)
        weight = weight_of(form, held, rows[-1], dtype) if held else None
        of_thin: Any = None if built else gradient @ up
        if built:
            of_change = gradient.T @ seen
            of_side = up.T @ of_change if rule.side == "down" else of_change @ down.T
        elif rule.side == "down":
            of_side = of_thin.T @ seen
        else:
            of_side = gradient.T @ (seen @ down.T if thin is None else thin)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            if built and weight is not None and folds(dropout, dtype.itemsize):
                x_gradient = gradient @ torch.addmm(weight, up, down)
            else:
                x_gradient = gradient @ (up @ down) if built else of_thin @ down
                x_gradient = drop_again(x_gradient, mask, dropout)
                if weight is not None:
                    x_gradient.addmm_(gradient, weight)
            x_gradient = x_gradient.to(given)
        found = rule.gradients([tensor.to(dtype) for tensor in own], of_side)
        cast = (None if g is None else g.to(t.dtype) for g, t in zip(found, own, strict=True))
        return x_gradient, *(None,) * 7, *cast, *(None,) * len(held)


def plus_thin(
    inputs: Tensor,
    base: Callable[[Tensor], Tensor],
    rule: ThinRule,
    tensors: Sequence[Tensor],
    *,
    built: bool,
    dropout: float = 0.0,
) -> Tensor:
    """base(inputs) + dropout(inputs) (U D)^T, in one operation where `base` is a frozen product.

    Args:
        inputs: [..., in].
        tensors: of which the rule makes D and U; they compute in autocast's dtype, else in the most
            precise one of theirs and the inputs'.
        built: whether U D is made, once a pass, or applied as two products.
    """
    dtype = compute_dtype(inputs, tensors[0])
    if not torch.compiler.is_compiling() and transforms_run():
        frozen = base(inputs)
        down, up = rule.matrices([tensor.to(dtype) for tensor in tensors])
        thin = F.linear(F.dropout(inputs.to(dtype), dropout), down)
        return (frozen + F.linear(thin, up)).to(frozen.dtype)

    def both(rows: Tensor, frozen: FrozenProduct) -> Tensor:
        about = rule, built, dropout, dtype, frozen.bias, frozen.form, len(tensors)
        made: Tensor = _FrozenPlusThin.apply(rows, *about, *tensors, *frozen.held)
        return made

    return next_to_frozen(inputs, base, tensors[0], both)
