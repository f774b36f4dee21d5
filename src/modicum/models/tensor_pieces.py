"""Tensors that are made of pieces of files' tensors, read piece by piece into what holds them.

So no more than a little of a file is in memory next to the tensor that is filled, and a rank that
holds some of its rows reads what these are made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.models.safetensors_file import TensorEntry, TensorReader

_AT_ONCE = 1 << 23  # bytes of a file


@dataclass(frozen=True)
class TensorPiece:
    """Elements of a file's tensor, and where they stand in a tensor that is made of several.

    Args:
        part: which of the files' tensors it is, by number.
        view: these elements as a view of it, without memory: its shape, strides and offset count.
        place: the index of the first of them in what is made.

    >>> part = torch.empty(4, 3, device="meta")
    >>> piece = TensorPiece(0, part, (0, 0)).narrow(0, 1, 2)
    >>> tuple(piece.view.shape), piece.place
    ((2, 3), (1, 0))
    """

    part: int
    view: Tensor
    place: tuple[int, ...]

    @classmethod
    def full(cls, part: int, view: Tensor) -> TensorPiece:
        """All elements of a tensor, where it is what is made, or the first that is put into it."""
        return cls(part, view, (0,) * view.dim())

    def narrow(self, dim: int, start: int, length: int) -> TensorPiece:
        """Those of the elements that are among `length` of a dimension after its first `start`."""
        place = list(self.place)
        place[dim] += start
        return TensorPiece(self.part, self.view.narrow(dim, start, length), tuple(place))

    def within(self, dim: int, start: int, length: int) -> TensorPiece | None:
        """The same of what is made, not of the piece; None: it has none of them."""
        first = max(start, self.place[dim])
        last = min(start + length, self.place[dim] + self.view.shape[dim])
        return self.narrow(dim, first - self.place[dim], last - first) if first < last else None

    def steps(self, most: int) -> Iterator[TensorPiece]:
        """Pieces that are this one together, of about `most` elements, each rows of its file."""
        sizes, strides = self.view.shape, self.view.stride()
        dim = max(range(len(sizes)), key=lambda dim: (sizes[dim] > 1) * strides[dim], default=0)
        times = math.ceil(self.view.numel() / most)
        if times <= 1 or sizes[dim] == 1:
            yield self
            return
        length = max(1, sizes[dim] // times)
        for start in range(0, sizes[dim], length):
            yield from self.narrow(dim, start, min(length, sizes[dim] - start)).steps(most)

    def read(self, entry: TensorEntry, files: TensorReader) -> Tensor:
        """The elements, on the CPU, in the file's own pages: copy them, and let go of them."""
        if not entry.shape:
            return files.read(entry).reshape(self.view.shape)
        row, first = math.prod(entry.shape[1:]), self.view.storage_offset()
        sizes = zip(self.view.shape, self.view.stride(), strict=True)
        last = first + sum((size - 1) * stride for size, stride in sizes)
        rows = files.read(entry, first // row, last // row - first // row + 1).contiguous()
        begin = rows.storage_offset() + first % row
        return rows.as_strided(self.view.shape, self.view.stride(), begin)


@torch.no_grad()
def read_pieces(
    parts: Sequence[TensorEntry], pieces: Iterable[TensorPiece], target: Tensor, before: int = 0
) -> None:
    """Copy pieces of files' tensors to their places, cast to the target's dtype.

    Args:
        parts: the files' tensors.
        target: what is made of them, or some of its rows (of dimension 0).
        before: how many rows are before those.

    Raises:
        InputError: a file cannot be read.
        ValueError: the target has elements that no piece has.
    """
    files, filled = TensorReader(_AT_ONCE), 0
    for piece in pieces:
        own = piece.within(0, before, target.shape[0]) if target.dim() else piece
        if own is None or own.view.numel() == 0:
            continue
        entry = parts[piece.part]
        for step in own.steps(max(1, _AT_ONCE * math.prod(entry.shape) // entry.bytes)):
            places = list(zip(step.place, step.view.shape, strict=True))
            begins = [start - before * (dim == 0) for dim, (start, _) in enumerate(places)]
            box = [slice(b, b + size) for b, (_, size) in zip(begins, places, strict=True)]
            target[tuple(box)].copy_(step.read(entry, files))
            filled += step.view.numel()
    if filled != target.numel():
        raise ValueError(f"{filled} elements are in the files, of {target.numel()}")


def read_into(entry: TensorEntry, target: Tensor, before: int = 0) -> None:
    """Copy a file's tensor into `target`, or those of its rows that `target` has.

    Args:
        before: how many rows of the file's tensor are before those.

    Raises:
        InputError: the file cannot be read.
        ValueError: the target is no rows of it.
    """
    view = torch.empty(entry.shape, device="meta")
    read_pieces([entry], [TensorPiece.full(0, view)], target, before)
