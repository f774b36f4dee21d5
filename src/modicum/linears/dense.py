"""The dense form: `torch.nn.Linear` itself, so that all that knows `nn.Linear` knows it too."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from modicum.core.meta import on_meta
from modicum.linears.base import LinearForm, register


def from_dense(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """An `nn.Linear` around `weight` [out, in] and `bias` [out]; neither is copied."""
    with on_meta():
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def to_dense(linear: nn.Module) -> Tensor:
    """The layer's own weight [out, in], not a copy."""
    return cast(nn.Linear, linear).weight


DENSE = register(LinearForm("dense", nn.Linear, from_dense, to_dense))
