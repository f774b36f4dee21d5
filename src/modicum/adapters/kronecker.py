"""A change of a frozen layer that is a sum of Kronecker products: factored, or built.

With x as a matrix X [n1, n2], kron(A, B) x is A X B^T, so two small products do what a matrix as
large as the layer would. With many positions it is less work to build that matrix, once a pass, and
to add it to the weight; forward and backward are judged apart. For the backward pass x is kept as
it was given, and dropout's mask as bits; all else is made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.dropping import drop, drop_again, mask_of
from modicum.adapters.fused import compute_dtype, next_to_frozen
from modicum.core.layers.frozen_product import NO_PRODUCT, FrozenProduct, weight_of
from modicum.core.layers.kronecker import KroneckerShape
from modicum.core.torch_private import transforms_run

# Whether the matrix is built in the forward pass, and whether in the backward pass.
WhichBuilt = tuple[bool, bool]
# Operations of a large product in the time that a number takes to memory and back: about as many on
# one core of a processor as on an accelerator.
_MOVED = 64


def forward_work(shape: KroneckerShape, terms: int, positions: int, *, built: bool) -> int:
    """Operations beyond the frozen product; what is built is added to its weight."""
    (m1, n1), (m2, n2) = shape.outer, shape.inner
    if built:
        return 2 * terms * m1 * n1 * m2 * n2
    return 2 * positions * terms * n1 * m2 * (n2 + m1)


def backward_work(shape: KroneckerShape, terms: int, positions: int, *, built: bool) -> int:
    """Operations beyond the frozen product's, with a gradient of x."""
    (m1, n1), (m2, n2) = shape.outer, shape.inner
    if built:
        return 6 * terms * m1 * n1 * m2 * n2 + 2 * positions * shape.rows * shape.columns
    return 2 * positions * terms * n1 * m2 * (3 * n2 + 2 * m1)


def worth_building(shape: KroneckerShape, terms: int, positions: int) -> WhichBuilt:
    """Whether building is likely the faster way: in the forward pass, and in the backward pass.

    What is moved counts too: small products give many numbers for the work that they are.

    >>> shape = KroneckerShape.of(512, 512)
    >>> worth_building(shape, 4, 64), worth_building(shape, 4, 1024)
    ((False, False), (True, True))
    """
    sizes = shape, terms, positions
    thin = positions * terms * shape.outer[1] * shape.inner[0]
    full = shape.padded[0] * shape.padded[1]
    forward = (
        forward_work(*sizes, built=True) + _MOVED * 4 * full,
        forward_work(*sizes, built=False) + _MOVED * 2 * thin,
    )
    backward = (
        backward_work(*sizes, built=True) + _MOVED * 8 * full,
        backward_work(*sizes, built=False) + _MOVED * 8 * thin,
    )
    return forward[0] < forward[1], backward[0] < backward[1]


def kronecker_map(rows: Tensor, outer: Tensor, inner: Tensor, shape: KroneckerShape) -> Tensor:
    """x [t, in] to [t, out] by the sum over k of kron(A_k, B_k), without that matrix.

    Args:
        outer, inner: A [r, m1, n1] and B [r, m2, n2].
    """
    thin = _thin(_filled(rows, shape), inner, shape)
    return _each(_side(outer), thin).flatten(1)[:, : shape.rows]


def _filled(rows: Tensor, shape: KroneckerShape) -> Tensor:
    """X of each position: [t, n1, n2]."""
    padding = shape.padded[1] - shape.columns
    filled = F.pad(rows, (0, padding)) if padding else rows
    return filled.reshape(len(rows), shape.outer[1], shape.inner[1])


def _thin(filled: Tensor, inner: Tensor, shape: KroneckerShape) -> Tensor:
    """X B_k^T of each position: [t, n1 r, m2]."""
    flat = filled.reshape(-1, shape.inner[1])
    width = shape.outer[1] * len(inner)
    return (flat @ _columns(inner)).view(len(filled), width, shape.inner[0])


def _columns(inner: Tensor) -> Tensor:
    """All B_k^T next to each other, [n2, r m2]."""
    return inner.flatten(0, 1).T


def _side(outer: Tensor) -> Tensor:
    """The A_k as one matrix, [m1, n1 r]."""
    return outer.permute(1, 2, 0).flatten(1)


def _each(matrix: Tensor, others: Tensor) -> Tensor:
    """A matrix times each of the others, as one kind of product whoever takes gradients."""
    return torch.bmm(matrix.expand(len(others), *matrix.shape), others)


def _gradients(
    seen: Tensor,
    gradient: Tensor,
    outer: Tensor,
    inner: Tensor,
    shape: KroneckerShape,
    *,
    of_inputs: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Those of x [t, in], if asked for, A and B, where y has `gradient` [t, out]."""
    (m1, n1), (m2, n2), terms, count = shape.outer, shape.inner, len(outer), len(seen)
    filled = _filled(seen, shape)
    given = F.pad(gradient, (0, m1 * m2 - shape.rows)).reshape(count, m1, m2)
    thin = _thin(filled, inner, shape)
    met = given.transpose(0, 1).flatten(1) @ thin.transpose(1, 2).flatten(0, 1)
    of_outer = met.view(m1, n1, terms).permute(2, 0, 1)
    del thin
    of_thin = _each(_side(outer).T, given).view(count * n1, terms * m2)
    of_inner = (of_thin.T @ filled.reshape(-1, n2)).view_as(inner)
    if not of_inputs:
        return None, of_outer, of_inner
    of_x = (of_thin @ _columns(inner).T).view(count, n1 * n2)[:, : shape.columns]
    return of_x, of_outer, of_inner


class _FrozenPlusKronecker(torch.autograd.Function):
    """y = x W^T + b + dropout(x) D^T for x [t, in], D the sum of kron(A_k, B_k); W has no gradient.

    Where nothing is held, the update alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        outer: Tensor,
        inner: Tensor,
        bias: Tensor | None,
        shape: KroneckerShape,
        built: WhichBuilt,
        dropout: float,
        dtype: torch.dtype,
        form: str,
        *held: Tensor,
    ) -> Tensor:
        cast = x.to(dtype)
        seen, bits = drop(cast, dropout)
        a, b = outer.to(dtype), inner.to(dtype)
        ctx.about = shape, built[1], dropout, dtype, form
        ctx.save_for_backward(x, bits, outer, inner, *held)
        if not held:
            return kronecker_map(seen, a, b, shape)
        weight = weight_of(form, held, x.shape[-1], dtype)
        offset = bias if bias is None else bias.to(dtype)
        if built[0]:
            return F.linear(cast, weight + shape.product(a, b), offset)
        return F.linear(cast, weight, offset).add_(kronecker_map(seen, a, b, shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("an adapter of Kronecker products has no second derivatives")
        x, bits, outer, inner, *held = ctx.saved_tensors
        shape, built, dropout, dtype, form = ctx.about
        a, b, mask = outer.to(dtype), inner.to(dtype), mask_of(bits, x.shape)
        seen = drop_again(x.to(dtype, copy=mask is not None), mask, dropout)
        of_x = ctx.needs_input_grad[0]
        weight = weight_of(form, tuple(held), x.shape[-1], dtype) if of_x and held else None
        x_gradient = None
        if built:
            met = shape.rearranged(gradient.T @ seen)
            of_outer = (b.flatten(1) @ met.T).view_as(outer)
            of_inner = (a.flatten(1) @ met).view_as(inner)
            if weight is not None:
                x_gradient = (gradient @ (weight + shape.product(a, b))).to(x.dtype)
        else:
            update, of_outer, of_inner = _gradients(seen, gradient, a, b, shape, of_inputs=of_x)
            if update is not None:
                update = drop_again(update, mask, dropout)
                x_gradient = update if weight is None else update.addmm(gradient, weight)
                x_gradient = x_gradient.to(x.dtype)
        of_factors = of_outer.to(outer.dtype), of_inner.to(inner.dtype)
        return x_gradient, *of_factors, *(None,) * (6 + len(held))


def plus_kronecker(
    inputs: Tensor,
    base: Callable[[Tensor], Tensor],
    outer: Tensor,
    inner: Tensor,
    shape: KroneckerShape,
    *,
    built: WhichBuilt = (False, False),
    dropout: float = 0.0,
) -> Tensor:
    """base(inputs) + dropout(inputs) D^T, in one operation where `base` is a frozen product.

    Args:
        inputs: [..., in].
        outer, inner: A [r, m1, n1] and B [r, m2, n2] of D, the sum of the kron(A_k, B_k); they
            compute in autocast's dtype, else in the more precise one of theirs and the inputs'.
        built: whether D is made and added to W, for the outputs and for the gradients. Not where it
            would lose a part: with dropout, and below fp32, in which W swallows small changes.
    """
    dtype = compute_dtype(inputs, outer)
    rows = inputs.reshape(-1, inputs.shape[-1])
    if not torch.compiler.is_compiling() and transforms_run():
        frozen, seen = base(inputs), F.dropout(rows.to(dtype), dropout)
        update = kronecker_map(seen, outer.to(dtype), inner.to(dtype), shape)
        return (frozen + update.view(frozen.shape)).to(frozen.dtype)

    def both(rows: Tensor, frozen: FrozenProduct) -> Tensor:
        alone = frozen is NO_PRODUCT or not folds(dropout, dtype.itemsize)
        about = shape, (False, False) if alone else built, dropout, dtype, frozen.form
        made: Tensor = _FrozenPlusKronecker.apply(
            rows, outer, inner, frozen.bias, *about, *frozen.held
        )
        return made

    return next_to_frozen(inputs, base, outer, both)


def folds(dropout: float, compute_bytes: int) -> bool:
    """Whether a change can be added to the weight, for one product of both."""
    return not dropout and compute_bytes >= torch.float32.itemsize
