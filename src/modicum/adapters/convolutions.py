"""Convolutions as sites: their weight as a matrix, and low-rank changes of that.

W [out, in / g, kernel...] of g groups is the matrix [out, in / g * kernel places].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from modicum.core.layers.computing_with import computing_with
from modicum.core.layers.layer_sites import Site
from modicum.core.layers.plain_layers import plain_type, why_not_plain

_KINDS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MIXING: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
ConvolutionLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d


def as_matrix(model: nn.Module, site: Site) -> Site:
    """The site of a convolution, whose inputs are the columns of its weight as a matrix.

    >>> model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2))
    >>> as_matrix(model, Site("0", "convolution", 4, 6)).in_features
    18
    """
    weight = model.get_submodule(site.name)._parameters.get("weight")
    if weight is None or isinstance(weight, UninitializedParameter):
        return site
    return replace(site, in_features=math.prod(weight.shape[1:]))


def why_not(model: nn.Module, name: str) -> str | None:
    """Why a convolution may compute something else than its type says; None: it does not."""
    layer = model.get_submodule(name)
    like = next(kind for kind in _KINDS if isinstance(layer, kind))
    return why_not_plain(model, name, like)


def thin_product(layer: nn.Module, inputs: Tensor, a: Tensor) -> Tensor:
    """The convolution with A [r, in / g * places] for W: [..., g r, places...].

    Its stride, padding and dilation are the layer's. Of several groups each has its own channels,
    convolved with the same A.
    """
    assert isinstance(layer, ConvolutionLayer)
    kernels = a.view(a.shape[0], *layer.weight.shape[1:])
    kernels = torch.cat([kernels] * layer.groups) if layer.groups > 1 else kernels
    alone = {"weight": kernels} if layer.bias is None else {"weight": kernels, "bias": None}
    with computing_with(layer, alone):
        thin: Tensor = plain_type(layer).forward(layer, inputs)
    return thin


def convolved(layer: nn.Module, inputs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What the layer would give with B A [out, in / g * places] for W, and without a bias."""
    assert isinstance(layer, ConvolutionLayer)
    thin = thin_product(layer, inputs, a)
    places = layer.weight.ndim - 2
    return _MIXING[places](thin, b.view(*b.shape, *[1] * places), groups=layer.groups)


def plus_convolved(
    layer: nn.Module,
    inputs: Tensor,
    base: Callable[[Tensor], Tensor],
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """base(inputs), and `convolved` of dropout(inputs) times `scale`, computed in `dtype`."""
    outputs, dropped = base(inputs), F.dropout(inputs.to(dtype), dropout)
    update = convolved(layer, dropped, a.to(dtype), b.to(dtype))
    return (outputs + scale * update).to(outputs.dtype)


def as_peft(layer: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A and B as PEFT keeps them: those of a convolution are kernels, [r, in, places] and [out, r].

    >>> [x.shape[1:] for x in as_peft(nn.Conv1d(4, 6, 3), torch.ones(2, 12), torch.ones(6, 2))]
    [torch.Size([4, 3]), torch.Size([2, 1])]
    """
    if not isinstance(layer, ConvolutionLayer):
        return a, b
    places = layer.weight.shape[2:]
    return a.view(a.shape[0], -1, *places), b.view(*b.shape, *[1] * len(places))


def why_not_in_peft(layer: nn.Module) -> str | None:
    """Why PEFT's LoRA of a layer would be another one; None: it would not.

    There A is a convolution over all channels, without dilation, and padded with zeros.
    """
    if not isinstance(layer, ConvolutionLayer):
        return None
    if layer.groups != 1:
        return "its factors of a convolution of several groups read all channels, which W does not"
    if any(step != 1 for step in layer.dilation):
        return "its factors of a convolution have no dilation"
    if layer.padding_mode != "zeros":
        return "its factors of a convolution pad with zeros"
    return None
