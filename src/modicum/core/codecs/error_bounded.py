"""Tensors in fewer bytes with a bound on the error of every element: the protocol and the record.

`compress(tensor, absolute_bound)` gives a record whose `nbytes` are those of the buffers that it
holds; `decompress` gives back shape, strides and dtype, and no element is further from what it was
than the bound. `dual_quantization` does it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

Coding = Literal["raw", "sparse", "dense", "row", "plane"]
CODINGS: tuple[Coding, ...] = get_args(Coding)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ErrorBoundedCodec(Protocol):
    """What makes a tensor smaller under a bound on the error of every element."""

    def compress(self, tensor: Tensor, absolute_bound: float) -> Any:
        """A record; its `nbytes` are exactly the bytes that it holds."""

    def decompress(self, record: Any) -> Tensor:
        """A tensor of the same shape, strides and dtype; the same however often it is asked."""

    def nonzero(self, record: Any) -> Tensor:
        """Where the tensor was not zero: bool of its shape, exact whatever the bound."""


@dataclass(frozen=True)
class CodedMaps:
    """Full feature maps of a tensor, or a part of one, coded together.

    Args:
        coding: `raw` elements as they are; `sparse` a bit an element, and numbers for those that
            are not zero; `dense` a number an element; `row` and `plane` what the neighbour to the
            left, or the three to the left and above, leave of it.
        maps: [number, height, width].
        half: half the width of a bin.
        signed: whether numbers have signs.
        parts: the buffers by name. `places` and `values` are the elements that stay as they were.
    """

    coding: Coding
    maps: tuple[int, int, int]
    half: float
    signed: bool
    parts: Mapping[str, Tensor]

    @property
    def count(self) -> int:
        """How many elements there are."""
        return math.prod(self.maps)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(part.untyped_storage().nbytes() for part in self.parts.values())


@dataclass(frozen=True)
class CompressedTensor:
    """A tensor under an error bound: what `DualQuantization` makes of it.

    Args:
        strides: of the tensor, where its elements lie close together; else of a contiguous one.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    pieces: tuple[CodedMaps, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers held."""
        return sum(piece.nbytes for piece in self.pieces)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides, if elements lie close together without overlap; else those of a copy."""
    if is_dense(tensor.shape, tensor.stride()):
        return tensor.stride()
    return contiguous_strides(tensor.shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides lay out every element of a shape once, without gaps.

    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (4, 1))
    (True, False)
    """
    expected = 1
    for stride, length in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= length
    return True


def laid_out(parts: Iterable[Tensor], record: CompressedTensor, dtype: torch.dtype) -> Tensor:
    """The pieces' elements, one after the other, in the record's shape and strides."""
    flat = torch.empty(math.prod(record.shape), dtype=dtype, device=record.device)
    start = 0
    for part in parts:
        flat[start : start + len(part)] = part
        start += len(part)
    whole = flat.view(record.shape)
    if whole.stride() == record.strides:
        return whole
    empty = torch.empty_strided(record.shape, record.strides, dtype=dtype, device=record.device)
    return empty.copy_(whole)
