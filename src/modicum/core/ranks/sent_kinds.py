"""Kinds of tensors that exchanges do not take, each refused with a sentence."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from modicum.core.errors import InputError


def refuse_complex(named: Iterable[tuple[str, Tensor]]) -> None:
    """Make sure that none of these parameters, or of these gradients of some, is complex.

    Raises:
        InputError: one is.

    >>> refuse_complex([("weight", Tensor([1.0]))])
    """
    for name, tensor in named:
        if tensor.is_complex():
            raise InputError(
                "complex parameters are not taken, as what is kept or sent of them is real and "
                "would lose the imaginary part; train torch.view_as_real of it as the parameter",
                field=name,
            )


def refuse_sparse(named: Iterable[tuple[str, Tensor]]) -> None:
    """Make sure that none of these gradients is sparse.

    Raises:
        InputError: one is.

    >>> refuse_sparse([("weight", Tensor([1.0]))])
    """
    for name, gradient in named:
        if gradient.layout != torch.strided:
            raise InputError(
                "its gradient is sparse, and exchanges of gradients send dense ones; give the "
                "embedding sparse=False",
                field=name,
            )
