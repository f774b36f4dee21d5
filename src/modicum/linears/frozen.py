"""Layers whose frozen weight is held as codes, and is dense for the length of one product only.

It is made anew in the backward pass, so that nothing but the codes is kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from modicum.core.errors import InputError
from modicum.core.layers.form_layer import FormLayer, StoredRows, TensorShapes
from modicum.core.layers.frozen_product import weight_of
from modicum.core.layers.linear_forms import own_rows
from modicum.core.ranks.sharding import cut_alike, own_part

# Elements that are coded at a time: what fits into a processor's cache, or fills an accelerator.
CPU_CHUNK, ACCELERATOR_CHUNK = 1 << 18, 1 << 24


class FrozenLinear(FormLayer):
    """y = x W^T + b for a frozen W [out, in] that is held as codes; the bias is a plain one.

    A form says which bytes it has (`coded`), which W they are (`frozen_weight`) and how rows of W
    come into them (`code`). They are uint8, so that a cast of the model leaves them alone; where
    they have no row for each output, the form has a `to_dense` of its own. Products have the
    input's dtype, or autocast's.

    Attributes:
        form: the name that the form is known by.
    """

    trains = False
    form: ClassVar[str]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **arguments: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        for name, shape in self.coded(in_features, out_features, **arguments).items():
            empty = torch.empty(shape, dtype=torch.uint8, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        offset = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if offset is None else nn.Parameter(offset))

    @classmethod
    @abstractmethod
    def coded(cls, in_features: int, out_features: int, **arguments: Any) -> TensorShapes:
        """The shapes of the tensors of bytes that W is held in, by name: [rows, bytes]."""

    @abstractmethod
    def code(self, weight: Tensor, held: Sequence[Tensor]) -> None:
        """Put what rows of W [n, in] become into this rank's parts of the tensors, in their order.

        Raises:
            InputError: the form cannot hold such numbers.
        """

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None, **arguments: Any) -> Self:
        """The layer that holds `weight` [out, in], coded; `bias` [out] is not copied."""
        layer = cls(weight.shape[1], weight.shape[0], False, device=weight.device, **arguments)
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        with torch.no_grad():
            layer.write(weight)
        return layer

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., in] to [..., out]."""
        kind = inputs.device.type
        half = kind != "meta" and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if half else inputs.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        how = ":".join((self.form, *self.frozen_how()))
        product: Tensor = _Product.apply(inputs.to(dtype), bias, how, *self.frozen_tensors())
        return product

    def frozen_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that W is held in, in the order of `coded`."""
        names = self.coded(self.in_features, self.out_features, **self.arguments())
        return tuple(getattr(self, name) for name in names)

    def to_dense(self) -> Tensor:
        """The weight that is held: float32 [out, in], sharded as the tensors are."""
        held = self.frozen_tensors()
        own = tuple(own_part(tensor)[0] for tensor in held)
        weight = self.frozen_weight(own, self.in_features, torch.float32, *self.frozen_how())
        return cut_alike(weight, held[0], self.in_features)

    def write(self, weight: Tensor) -> None:
        """Code `weight` [out, in], or of a layer that is sharded over ranks this rank's rows of it.

        Raises:
            InputError: the shape is another.
        """
        weight, (rows, _) = own_part(weight)[0], own_rows(self)
        if weight.shape != (rows, self.in_features):
            raise InputError(
                f"a weight of shape {[rows, self.in_features]} belongs into this layer",
                field="weight",
                value=list(weight.shape),
            )
        self.code(weight, [own_part(tensor)[0] for tensor in self.frozen_tensors()])

    @classmethod
    def shapes(cls, in_features: int, out_features: int, **arguments: Any) -> TensorShapes:
        """Files hold the weight that the codes are made of."""
        return {"weight": (out_features, in_features)}

    @classmethod
    def stored(
        cls, in_features: int, out_features: int, item_bytes: int, **arguments: Any
    ) -> StoredRows:
        """The rows and bytes of what W is held in."""
        coded = cls.coded(in_features, out_features, **arguments).values()
        return tuple((rows, each) for rows, each in coded)


def chunk_of(device: str) -> int:
    """Elements that are coded at a time on this kind of device."""
    return CPU_CHUNK if device == "cpu" else ACCELERATOR_CHUNK


class _Product(torch.autograd.Function):
    """x W^T + b, which keeps what W is held in and no input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, form: str, *held: Tensor) -> Tensor:
        ctx.save_for_backward(*held)
        ctx.columns, ctx.form = x.shape[-1], form
        return F.linear(x, weight_of(form, held, x.shape[-1], x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        held, x_gradient, bias_gradient = ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:
            weight = weight_of(ctx.form, held, ctx.columns, gradient.dtype)
            x_gradient = gradient @ weight
        if ctx.needs_input_grad[1]:
            bias_gradient = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return x_gradient, bias_gradient, None, *(None,) * len(held)
