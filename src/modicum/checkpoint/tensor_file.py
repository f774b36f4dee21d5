"""One rank's file of tensors: safetensors, laid out before it is written, summed up as it is.

The header is padded so that tensors begin at a page. A staging buffer that holds the file byte for
byte can then be written without a copy, past the system's page cache.

The checksum is a CRC-32, which finds what disks and wires do to a file. A SHA-256 takes the
processor more than twice as long even with instructions for it, and the thread that writes takes
that time from training.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from modicum.checkpoint.tensor_slices import DTYPES, Box, TensorSlice, overlap
from modicum.core.files import regular

PAGE = 4096
# Written and summed up at a time: the fewer, the less often does the thread that does it ask for
# Python's lock, which training wants as well.
CHUNK = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class FileLayout:
    """Where each piece stands in a file of `size` bytes that begins with `header`."""

    header: bytes
    places: dict[TensorSlice, int]
    size: int

    @classmethod
    def of(cls, pieces: Sequence[TensorSlice]) -> FileLayout:
        """The layout of a file of these pieces, the widest dtypes first, so that all are aligned.

        Raises:
            ValueError: two pieces have one name.
        """
        entries: dict[str, Any] = {}
        offsets: dict[TensorSlice, int] = {}
        end = 0
        for piece in sorted(pieces, key=lambda piece: -piece.item_bytes):
            if piece.stored_name in entries:
                raise ValueError(f"two tensors are named {piece.stored_name!r}")
            offsets[piece], end = end, end + piece.nbytes
            entries[piece.stored_name] = {
                "dtype": piece.dtype,
                "shape": piece.sizes,
                "data_offsets": [offsets[piece], end],
            }
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % PAGE)
        header = len(text).to_bytes(8, "little") + text
        places = {piece: len(header) + offset for piece, offset in offsets.items()}
        return cls(header, places, len(header) + end)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in order, of its own memory where that is possible."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def streamed(layout: FileLayout, tensors: dict[TensorSlice, Tensor]) -> Iterator[memoryview]:
    """A file's content, chunk by chunk, straight from the tensors."""
    yield memoryview(layout.header)
    for piece in layout.places:
        if piece.nbytes:
            yield from chunks(bytes_of(tensors[piece]))


def chunks(content: memoryview) -> Iterator[memoryview]:
    """Content in pieces of `CHUNK` bytes."""
    for start in range(0, len(content), CHUNK):
        yield content[start : start + CHUNK]


def write_file(path: Path, content: Iterable[memoryview], *, direct: bool = False) -> str:
    """Write a new file, push it to the disk, and return its checksum.

    Args:
        content: in order; summed up as it is written.
        direct: go past the page cache where the file system lets one: `content` begins at a page
            of memory, and all its chunks but the last are full pages.
    """
    checksum = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        direct = direct and _set_direct(handle, True)
        for chunk in content:
            checksum = zlib.crc32(chunk, checksum)
            if direct and len(chunk) % PAGE:
                direct = _set_direct(handle, False)
            while chunk:
                written, direct = _write(handle, chunk, direct)
                chunk = chunk[written:]
        os.fsync(handle)
    finally:
        os.close(handle)
    return f"{checksum:08x}"


def file_checksum(path: Path) -> str:
    """The checksum of a file that is there."""
    checksum = 0
    with open(regular(path), "rb") as handle:
        while chunk := handle.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def _write(handle: int, chunk: memoryview, direct: bool) -> tuple[int, bool]:
    """Write some of a chunk: how much, and whether the next write may be direct as well."""
    try:
        written = os.write(handle, chunk)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
        return 0, _set_direct(handle, False)
    if direct and written % PAGE:
        return written, _set_direct(handle, False)
    return written, direct


def _set_direct(handle: int, direct: bool) -> bool:
    """Switch direct writing on or off; whether it is on now."""
    if not _DIRECT:
        return False
    import fcntl

    flags = fcntl.fcntl(handle, fcntl.F_GETFL) & ~_DIRECT
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | (_DIRECT if direct else 0))
    except OSError:
        return False
    return direct


def read_into(target: Tensor, box: Box, path: Path, pieces: Iterable[TensorSlice]) -> int:
    """Fill `target`, the part `box` of a tensor, from pieces of it in a file; only what is needed.

    Returns:
        How many elements were filled.
    """
    filled = 0
    with safe_open(path, framework="pt") as file:
        for piece in pieces:
            both = overlap(box, (piece.offsets, piece.sizes))
            if both is None:
                continue
            here, there = both
            if there:
                value = file.get_slice(piece.stored_name)[there]
            else:
                value = file.get_tensor(piece.stored_name)
            if value.dtype != DTYPES[piece.dtype]:
                raise ValueError(f"{piece.stored_name} is {value.dtype}")
            target[here].copy_(value)
            filled += value.numel()
    return filled
