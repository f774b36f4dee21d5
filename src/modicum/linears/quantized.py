"""What the quantized forms share: frozen weights in few bits, dense again while they are used.

A form is a table of levels between -1 and 1. A group of consecutive weights of a row is stored as
the nearest levels times the group's largest magnitude, its scale; the scales of a row are stored in
8 bits in turn ("double quantization"). The weight that products are computed with lives for one
product only: it is made anew in the backward pass, so that nothing but the codes is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from modicum.core.errors import InputError
from modicum.core.layers.form_layer import FormLayer, StoredRows, TensorShapes
from modicum.core.layers.linear_forms import linear_form
from modicum.core.ranks.sharding import cut_alike, own_part

GROUP = 64  # weights that share a scale
_RANGE_BYTES = 8  # of a row's scales: the smallest, and the step between two codes
# Elements that are coded at a time: what fits into a processor's cache, or fills an accelerator.
_CPU_CHUNK, _ACCELERATOR_CHUNK = 1 << 18, 1 << 24
_TINY = torch.finfo(torch.float32).tiny
_CELLS = 1024  # between -1 and 1, each narrower than any two levels are apart


class QuantizedLinear(FormLayer):
    """y = x W^T + b for a frozen W [out, in] that is held as codes; the bias is a plain one.

    All tensors have a row for each output, and rows are coded one by one: the codes of a part of
    the rows are that part of the codes, whoever holds it. Products have the input's dtype, or
    autocast's.

    Attributes:
        codes: uint8 [out, ceil(in / k)], k codes a byte, the first in the highest bits.
        scales: uint8 [out, ceil(in / 64)], the groups' scales as codes; the last group of a row may
            be short.
        ranges: float32 [out, 2], the row's smallest scale and the step between two codes of scales,
            as uint8 [out, 8]: so a cast of the model leaves them alone.
    """

    trains = False
    form: ClassVar[str]
    levels: ClassVar[tuple[float, ...]]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features

        def frozen(columns: int) -> nn.Parameter:
            empty = torch.empty(out_features, columns, dtype=torch.uint8, device=device)
            return nn.Parameter(empty, requires_grad=False)

        self.codes = frozen(_bytes_of_codes(in_features, self.levels))
        self.scales = frozen(-(-in_features // GROUP))
        self.ranges = frozen(_RANGE_BYTES)
        offset = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if offset is None else nn.Parameter(offset))

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None, **arguments: Any) -> Self:
        """The layer that holds `weight` [out, in], coded; `bias` [out] is not copied."""
        layer = cls(weight.shape[1], weight.shape[0], False, device=weight.device)
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
        product: Tensor = _Product.apply(inputs.to(dtype), bias, *self.frozen_tensors(), self.form)
        return product

    def frozen_tensors(self) -> tuple[Tensor, ...]:
        """Codes, scales and ranges."""
        return self.codes, self.scales, self.ranges

    @classmethod
    def frozen_weight(cls, held: tuple[Tensor, ...], columns: int, dtype: torch.dtype) -> Tensor:
        """The weight of one product."""
        codes, scales, ranges = held
        weight: Tensor = decode(codes, scales, ranges, columns, cls.form, dtype)
        return weight

    def to_dense(self) -> Tensor:
        """The weight that the codes represent: float32 [out, in], sharded as they are."""
        held = (own_part(tensor)[0] for tensor in (self.codes, self.scales, self.ranges))
        weight = decode(*held, self.in_features, self.form, torch.float32)
        return cut_alike(weight, self.codes, self.in_features)

    def write(self, weight: Tensor) -> None:
        """Code `weight` [out, in], or of a layer that is sharded over ranks this rank's rows of it.

        Raises:
            InputError: the shape is another.
        """
        weight, codes = own_part(weight)[0], own_part(self.codes)[0]
        if weight.shape != (codes.shape[0], self.in_features):
            raise InputError(
                f"a weight of shape {[codes.shape[0], self.in_features]} belongs into this layer",
                field="weight",
                value=list(weight.shape),
            )
        scales, ranges = own_part(self.scales)[0], own_part(self.ranges)[0]
        for rows in _chunks(codes, self.in_features):
            coded = _encode(weight[rows].to(codes.device, torch.float32), self.form)
            for held, piece in zip((codes, scales, ranges), coded, strict=True):
                held[rows].copy_(piece)

    @classmethod
    def shapes(cls, in_features: int, out_features: int, **arguments: Any) -> TensorShapes:
        """Files hold the weight that the codes are made of."""
        return {"weight": (out_features, in_features)}

    @classmethod
    def stored(
        cls, in_features: int, out_features: int, item_bytes: int, **arguments: Any
    ) -> StoredRows:
        """Codes, scales and ranges."""
        codes, scales = _bytes_of_codes(in_features, cls.levels), -(-in_features // GROUP)
        return (out_features, codes), (out_features, scales), (out_features, _RANGE_BYTES)

    @classmethod
    def workspace(
        cls, in_features: int, out_features: int, item_bytes: int, **arguments: Any
    ) -> int:
        """Bytes of the weight while it is used, and of what a chunk of it is made in."""
        elements = in_features * out_features
        # Of a chunk the indices, four bytes for each byte of codes, and the product in fp32.
        each = 4 + 4 * _bytes_of_codes(in_features, cls.levels) / in_features
        return elements * item_bytes + round(each * min(elements, _CPU_CHUNK))


class _Product(torch.autograd.Function):
    """x W^T + b, which keeps W's codes and no input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        codes: Tensor,
        scales: Tensor,
        ranges: Tensor,
        form: str,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, ranges)
        ctx.columns, ctx.form = x.shape[-1], form
        return F.linear(x, decode(codes, scales, ranges, x.shape[-1], form, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            weight = decode(*ctx.saved_tensors, ctx.columns, ctx.form, gradient.dtype)
            x_gradient = gradient @ weight
        if ctx.needs_input_grad[1]:
            bias_gradient = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return x_gradient, bias_gradient, None, None, None, None


# An operator of its own, so that compiled graphs hold it as one: the weight is the same to the bit,
# and chunks and tables stay out of the graph.
@torch.library.custom_op("modicum::decode", mutates_args=())
def decode(
    codes: Tensor, scales: Tensor, ranges: Tensor, columns: int, form: str, dtype: torch.dtype
) -> Tensor:
    """The weight [out, columns] that the tensors of a quantized layer represent, in `dtype`."""
    table = _table(form, codes.device)
    weight = torch.empty(codes.shape[0], columns, dtype=dtype, device=codes.device)
    for rows in _chunks(codes, columns):
        _decode_into(weight[rows], codes[rows], scales[rows], ranges[rows], table)
    return weight


def _decode_into(
    weight: Tensor, codes: Tensor, scales: Tensor, ranges: Tensor, table: Tensor
) -> None:
    rows, columns = weight.shape
    # One element of the table is all that a byte represents.
    values = table.index_select(0, codes.flatten().int()).view(torch.float32)
    values = values.view(rows, -1)[:, :columns]
    whole, groups = columns // GROUP, _scales(scales, ranges)
    values[:, : whole * GROUP].unflatten(1, (-1, GROUP)).mul_(groups[:, :whole, None])
    values[:, whole * GROUP :].mul_(groups[:, whole:])
    weight.copy_(values)


@decode.register_fake
def _(
    codes: Tensor, scales: Tensor, ranges: Tensor, columns: int, form: str, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((codes.shape[0], columns), dtype=dtype)


def _encode(weight: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and ranges of rows [n, in] in fp32."""
    columns, levels = weight.shape[1], _levels(form)
    groups = F.pad(weight, (0, -columns % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(dim=2)
    low, high = largest.aminmax(dim=1, keepdim=True)
    step = (high - low) / 255
    scales = ((largest - low) / step.clamp_min(_TINY)).round().to(torch.uint8)
    ranges = torch.cat((low, step), dim=1).view(torch.uint8)
    # Nearest to what the scales' codes represent, not to the scales: a little less is lost.
    units = groups / _scales(scales, ranges).clamp_min(_TINY).unsqueeze(2)
    codes = _nearest(units, form).view(len(weight), -1)
    if _packed(levels) == 2:
        codes = codes[:, ::2] * 16 + codes[:, 1::2]
    return codes[:, : _bytes_of_codes(columns, levels)].to(torch.uint8), scales, ranges


def _nearest(units: Tensor, form: str) -> Tensor:
    """The number of the level that is nearest to each unit, the lower one's of two: int32."""
    below, middles = _cells(form, units.device)
    cells = _cell(units).flatten()
    above = units.flatten() > middles.index_select(0, cells)
    return below.index_select(0, cells) + above


def _cell(units: Tensor) -> Tensor:
    """The cell of each unit, those beyond -1 and 1 in the outermost: int32, never falling."""
    return ((units + 1) * (_CELLS // 2)).int().clamp_(0, _CELLS - 1)


@cache
def _cells(form: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each cell, how many middles between levels are in cells before, and the next middle.

    A search in a table of two columns, which is what `torch.bucketize` does in many steps.
    """
    levels = torch.tensor(_levels(form), device=device)
    middles = (levels[1:] + levels[:-1]) / 2
    below = torch.searchsorted(_cell(middles), torch.arange(_CELLS, device=device).int())
    infinite = torch.tensor([torch.inf], device=device)
    return below.int(), torch.cat((middles, infinite))[below]


def _scales(scales: Tensor, ranges: Tensor) -> Tensor:
    """The groups' scales [n, groups] in fp32: low + step * code, rounded twice on any device."""
    low, step = ranges.view(torch.float32).unsqueeze(2).unbind(1)
    return (scales * step).add_(low)


def _chunks(codes: Tensor, columns: int) -> Iterator[slice]:
    """The rows of `codes`, so many at a time as make a chunk of weights."""
    chunk = _CPU_CHUNK if codes.device.type == "cpu" else _ACCELERATOR_CHUNK
    step = max(1, chunk // max(1, columns))
    for start in range(0, codes.shape[0], step):
        yield slice(start, min(start + step, codes.shape[0]))


def _packed(levels: Sequence[float]) -> int:
    """Codes in a byte."""
    return 2 if len(levels) <= 16 else 1


def _bytes_of_codes(columns: int, levels: Sequence[float]) -> int:
    """Bytes of a row's codes."""
    return -(-columns // _packed(levels))


def _levels(form: str) -> tuple[float, ...]:
    """The levels of the form of that name."""
    kind = linear_form(form).kind
    assert issubclass(kind, QuantizedLinear)
    return kind.levels


@cache
def _table(form: str, device: torch.device) -> Tensor:
    """What each of the 256 bytes represents, one or two levels, as one element of a table."""
    levels = torch.tensor(_levels(form), device=device)
    packed = _packed(_levels(form))
    bytes_ = torch.cartesian_prod(*[levels] * packed).reshape(256, packed)
    return bytes_.view((torch.int32, torch.int64)[packed - 1]).flatten()
