"""Pieces of tensors: which part of which tensor a rank holds, and which rank writes it.

A piece is a box of a tensor. A full tensor is one piece; of a DTensor every rank holds its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modicum.core.ranks.sharding import is_sharded
from modicum.core.torch_private import local_box

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The names that safetensors has for dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class TensorSlice:
    """The part of the tensor `name` that begins at `offsets` of the full tensor and has `sizes`.

    >>> TensorSlice("w", "F32", (4, 3), (2, 0), (2, 3)).stored_name
    'w@2,0'
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> tuple[TensorSlice, Tensor]:
        """This rank's piece of a tensor, and what is in it.

        Raises:
            TypeError: safetensors has no word for its dtype, or it is a sum still to be made.
        """
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is {tensor.dtype}, which safetensors cannot hold")
        (offsets, sizes), local = box_of(tensor), tensor.detach()
        if is_sharded(local):
            if any(placement.is_partial() for placement in local.placements):
                raise TypeError(f"{name} is a sum over ranks that has not been made yet")
            local = local.to_local()
        return cls(name, _NAMES[tensor.dtype], tuple(tensor.shape), offsets, sizes), local

    @classmethod
    def of_json(cls, name: str, tensor: Mapping[str, Any], box: Mapping[str, Any]) -> TensorSlice:
        """A piece as a manifest tells of it."""
        shape, offsets, sizes = tensor["shape"], box["offsets"], box["sizes"]
        return cls(name, tensor["dtype"], tuple(shape), tuple(offsets), tuple(sizes))

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return math.prod(self.sizes) * self.item_bytes

    @property
    def stored_name(self) -> str:
        """Its name in a file: the tensor's, and where in the tensor it begins."""
        return self.name + ("@" + ",".join(map(str, self.offsets)) if any(self.offsets) else "")


def box_of(tensor: Tensor) -> Box:
    """Where this rank's part begins in the full tensor, and its size in each dimension."""
    if not is_sharded(tensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    return _box(shape, mesh, tuple(mesh.get_coordinate() or ()), tuple(tensor.placements))


@functools.lru_cache(maxsize=65536)
def _box(
    shape: tuple[int, ...], mesh: DeviceMesh, place: tuple[int, ...], placements: tuple[Any, ...]
) -> Box:
    # Cached, as it costs a tenth of a millisecond a tensor, and training waits for a save.
    return local_box(shape, mesh, placements)


def overlap(one: Box, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two boxes of a tensor overlap, as slices of the one and of the other; None: nowhere.

    >>> overlap(((0,), (4,)), ((3,), (5,)))
    ((slice(3, 4, None),), (slice(0, 1, None),))
    """
    inside_one, inside_other = [], []
    for offset, size, offset_, size_ in zip(*one, *other, strict=True):
        first, last = max(offset, offset_), min(offset + size, offset_ + size_)
        if first >= last:
            return None
        inside_one.append(slice(first - offset, last - offset))
        inside_other.append(slice(first - offset_, last - offset_))
    return tuple(inside_one), tuple(inside_other)


def divide(everybody: Sequence[Sequence[TensorSlice]]) -> list[list[TensorSlice]]:
    """What each rank writes: every piece once, by one of the ranks that hold it, evenly by bytes.

    The result is a function of what the ranks hold, so that all ranks find the same one.

    >>> one, other = (TensorSlice(name, "U8", (3,), (0,), (3,)) for name in "ab")
    >>> [[piece.name for piece in rank] for rank in divide([[one, other], [one, other]])]
    [['a'], ['b']]

    Raises:
        ValueError: the pieces of a tensor do not cover it, or are of different tensors.
    """
    holders: dict[TensorSlice, list[int]] = {}
    for rank, pieces in enumerate(everybody):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)
    _check_whole(list(holders))
    owned: list[set[TensorSlice]] = [set() for _ in everybody]
    load = [0] * len(everybody)
    for piece in sorted(holders, key=lambda piece: (-piece.nbytes, piece.stored_name)):
        if piece.nbytes:
            rank = min(holders[piece], key=lambda rank: (load[rank], rank))
            owned[rank].add(piece)
            load[rank] += piece.nbytes
    return [
        [piece for piece in pieces if piece in own]
        for pieces, own in zip(everybody, owned, strict=True)
    ]


def _check_whole(pieces: Sequence[TensorSlice]) -> None:
    tensors: dict[str, TensorSlice] = {}
    held: dict[str, int] = {}
    for piece in pieces:
        first = tensors.setdefault(piece.name, piece)
        if (first.shape, first.dtype) != (piece.shape, piece.dtype):
            raise ValueError(f"{piece.name} has another shape or dtype on another rank")
        held[piece.name] = held.get(piece.name, 0) + math.prod(piece.sizes)
    for name, piece in tensors.items():
        if held[name] != math.prod(piece.shape):
            raise ValueError(
                f"the ranks together hold {held[name]} elements of {name}, which has "
                f"{math.prod(piece.shape)}"
            )
