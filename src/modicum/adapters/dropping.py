"""Dropout that keeps its mask as bits for the backward pass, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.core.codecs.bit_packing import pack_bits, unpack_bits
from modicum.core.torch_private import transforms_run


def drop(x: Tensor, probability: float) -> tuple[Tensor, Tensor | None]:
    """x after dropout, and the mask as `pack_bits` has it; x itself and none where none is asked.

    For the forward pass of an operation of one's own: it takes no gradients.
    """
    if not probability:
        return x, None
    made, mask = torch.native_dropout(x, probability, True)
    return made, pack_bits(mask)


def mask_of(bits: Tensor | None, shape: torch.Size) -> Tensor | None:
    """The mask that `drop` packed."""
    return None if bits is None else unpack_bits(bits, shape.numel()).view(shape)


def through(probability: float) -> float:
    """What dropout multiplies with that which it lets through."""
    return 1.0 if probability == 1 else 1 / (1 - probability)


def drop_again(x: Tensor, mask: Tensor | None, probability: float) -> Tensor:
    """x in its own memory, as dropout with that mask lets it through; without one all of it."""
    return x if mask is None else x.mul_(mask).mul_(through(probability))


class _Dropped(torch.autograd.Function):
    """x after dropout, and the mask as bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float) -> tuple[Tensor, Tensor]:
        outputs, mask = torch.native_dropout(x, probability, True)
        bits = pack_bits(mask)
        ctx.about = probability, x.shape
        ctx.save_for_backward(bits)
        ctx.mark_non_differentiable(bits)
        return outputs, bits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        probability, shape = ctx.about
        mask = unpack_bits(bits, shape.numel()).view(shape)
        return gradient * mask * through(probability), None


def dropped_with_bits(x: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """x after dropout, and the mask as `pack_bits` has it, for who makes the same again."""
    made: tuple[Tensor, Tensor] = _Dropped.apply(x, probability)
    return made


def dropped(x: Tensor, probability: float) -> Tensor:
    """What `torch.nn.functional.dropout` gives in training, with an eighth of a byte kept a number.

    >>> x = torch.ones(4000, requires_grad=True)
    >>> y = dropped(x, 0.25)
    >>> y.unique().tolist(), bool(2800 < (y > 0).sum() < 3200)
    ([0.0, 1.3333333730697632], True)
    """
    if not torch.compiler.is_compiling() and transforms_run():
        return F.dropout(x, probability)
    return dropped_with_bits(x, probability)[0]
