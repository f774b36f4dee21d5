"""What the quantized forms share: frozen weights in few bits, dense again while they are used.

A form is a table of levels between -1 and 1. A group of consecutive weights of a row is stored as
the nearest levels times the group's largest magnitude, its scale; the scales of a row are stored in
8 bits in turn ("double quantization").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.layers.form_layer import TensorShapes
from modicum.core.layers.linear_forms import linear_form
from modicum.linears.frozen import FrozenLinear, chunk_of

GROUP = 64  # weights that share a scale
_RANGE_BYTES = 8  # of a row's scales: the smallest, and the step between two codes
_TINY = torch.finfo(torch.float32).tiny
_CELLS = 1024  # between -1 and 1, each narrower than any two levels are apart


class QuantizedLinear(FrozenLinear):
    """A frozen W [out, in] whose entries are levels times the scale of their group.

    All tensors have a row for each output, and rows are coded one by one: the codes of a part of
    the rows are that part of the codes, whoever holds it.

    Attributes:
        codes: uint8 [out, ceil(in / k)], k codes a byte, the first in the highest bits.
        scales: uint8 [out, ceil(in / 64)], the groups' scales as codes; the last group of a row may
            be short.
        ranges: float32 [out, 2], the row's smallest scale and the step between two codes of scales,
            as uint8 [out, 8]: so a cast of the model leaves them alone.
    """

    levels: ClassVar[tuple[float, ...]]
    codes: nn.Parameter
    scales: nn.Parameter
    ranges: nn.Parameter

    @classmethod
    def coded(cls, in_features: int, out_features: int, **arguments: Any) -> TensorShapes:
        codes, scales = _bytes_of_codes(in_features, cls.levels), -(-in_features // GROUP)
        return {
            "codes": (out_features, codes),
            "scales": (out_features, scales),
            "ranges": (out_features, _RANGE_BYTES),
        }

    @classmethod
    def frozen_weight(
        cls, held: tuple[Tensor, ...], columns: int, dtype: torch.dtype, *how: str
    ) -> Tensor:
        """The weight of one product."""
        codes, scales, ranges = held
        weight: Tensor = decode(codes, scales, ranges, columns, cls.form, dtype)
        return weight

    def code(self, weight: Tensor, held: Sequence[Tensor]) -> None:
        for rows in _chunks(held[0], self.in_features):
            coded = _encode(weight[rows].to(held[0].device, torch.float32), self.form)
            for part, piece in zip(held, coded, strict=True):
                part[rows].copy_(piece)

    @classmethod
    def workspace(
        cls,
        in_features: int,
        out_features: int,
        item_bytes: int,
        device: str = "cpu",
        **arguments: Any,
    ) -> int:
        """Bytes of the weight while it is used, and of what it is made of.

        On a GPU those are the scales in fp32, as on one that is planned for; where Triton is not
        there, and on a CPU, what a chunk of it is made in.
        """
        elements = in_features * out_features
        if device == "cuda" and (_has_triton() or not torch.cuda.is_available()):
            return elements * item_bytes + 4 * out_features * -(-in_features // GROUP)
        # Of a chunk the indices, four bytes for each byte of codes, and the product in fp32.
        each = 4 + 4 * _bytes_of_codes(in_features, cls.levels) / in_features
        return elements * item_bytes + round(each * min(elements, chunk_of(device)))


# An operator of its own, so that compiled graphs hold it as one: the weight is the same to the bit,
# and chunks and tables stay out of the graph.
@torch.library.custom_op("modicum::decode", mutates_args=())
def decode(
    codes: Tensor, scales: Tensor, ranges: Tensor, columns: int, form: str, dtype: torch.dtype
) -> Tensor:
    """The weight [out, columns] that the tensors of a quantized layer represent, in `dtype`."""
    weight = torch.empty(codes.shape[0], columns, dtype=dtype, device=codes.device)
    if codes.is_cuda and _has_triton():
        from modicum.linears.decode_kernel import decode_into

        decode_into(weight, codes, _scales(scales, ranges), _values(form, codes.device), GROUP)
        return weight
    table = _table(form, codes.device)
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
    step = max(1, chunk_of(codes.device.type) // max(1, columns))
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
def _has_triton() -> bool:
    """Whether GPU kernels can be compiled here."""
    return find_spec("triton") is not None


@cache
def _values(form: str, device: torch.device) -> Tensor:
    """The levels, in fp32."""
    return torch.tensor(_levels(form), device=device)


@cache
def _table(form: str, device: torch.device) -> Tensor:
    """What each of the 256 bytes represents, one or two levels, as one element of a table."""
    levels = _values(form, device)
    packed = _packed(_levels(form))
    bytes_ = torch.cartesian_prod(*[levels] * packed).reshape(256, packed)
    return bytes_.view((torch.int32, torch.int64)[packed - 1]).flatten()
