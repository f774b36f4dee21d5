"""The product of a layer that is not trained: what it holds, and the weight that this is.

Who computes something next to the product, as an adapter does, reads it here and computes both in
one operation, whatever form the weight is held in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modicum.core.layers.form_layer import FormLayer
from modicum.core.layers.linear_forms import form_of, linear_form
from modicum.core.layers.plain_layers import plain_type
from modicum.core.torch_private import is_plain_parameter

DENSE, TRANSPOSED = "dense", "transposed"


@dataclass(frozen=True)
class FrozenProduct:
    """y = x W^T + b of a layer, where nothing takes a gradient but x.

    Args:
        held: the tensors that W [out, in] is made of.
        form: how: `dense`, `transposed`, or the name of a linear form, and after colons what that
            must know of the layer.
    """

    held: tuple[Tensor, ...]
    bias: Tensor | None
    form: str
    in_features: int
    out_features: int


# For an operation that computes next to a product, where another one computes that.
NO_PRODUCT = FrozenProduct((), None, "", 0, 0)


def weight_of(form: str, held: tuple[Tensor, ...], columns: int, dtype: torch.dtype) -> Tensor:
    """W [out, in] in `dtype`: the tensor that is held, a view of it, or one for this use."""
    if form == DENSE:
        return held[0].to(dtype)
    if form == TRANSPOSED:
        return held[0].to(dtype).T
    name, *how = form.split(":")
    kind = linear_form(name).kind
    assert issubclass(kind, FormLayer)
    return kind.frozen_weight(held, columns, dtype, *how)


def frozen_product(layer: nn.Module) -> FrozenProduct | None:
    """The product that a layer's own `forward` computes.

    None where something of it is trained, or where it is no linear layer, no `Conv1D` of
    transformers and of no quantized form, or a subclass that computes in a way of its own.
    """
    kind, bias = plain_type(layer), layer._parameters.get("bias")
    if bias is not None and (bias.requires_grad or not is_plain_parameter(bias)):
        return None
    if isinstance(layer, FormLayer):
        held = layer.frozen_tensors()
        form = form_of(layer)
        if held is None or form is None or kind.forward is not form.kind.forward:
            return None
        how = ":".join((form.name, *layer.frozen_how()))
        return FrozenProduct(held, bias, how, layer.in_features, layer.out_features)
    weight = layer._parameters.get("weight")
    if weight is None or weight.requires_grad or not is_plain_parameter(weight):
        return None
    if kind.forward is nn.Linear.forward:
        return FrozenProduct((weight,), bias, DENSE, weight.shape[1], weight.shape[0])
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return FrozenProduct((weight,), bias, TRANSPOSED, *weight.shape)
    return None
