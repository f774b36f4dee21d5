"""Compressed tensors as bytes: a versioned, checked container that nothing unpickles.

Format: 7 bytes `MODICEB`; one byte, the version; 4 bytes CRC-32 of all that follows; 4 bytes, the
length of a JSON header; the header; the buffers one after the other. All little-endian.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from typing import Any

import torch
from torch import Tensor

from modicum.core.codecs.bit_packing import unpack_bits
from modicum.core.codecs.dual_quantization import unpack_numbers
from modicum.core.codecs.error_bounded import CODINGS, DTYPES, CodedMaps, CompressedTensor, is_dense
from modicum.core.errors import InputError

_MAGIC, _VERSION = b"MODICEB", 1
_START = len(_MAGIC) + 9
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_PARTS = {
    "raw": {"elements"},
    "sparse": {"mask", "widths", "payload", "deflated", "places", "values"},
}
_DENSE_PARTS = _PARTS["sparse"] - {"mask"}


def to_bytes(record: CompressedTensor) -> bytes:
    """The record as bytes.

    >>> from modicum.core.codecs.dual_quantization import DualQuantization
    >>> codec = DualQuantization()
    >>> record = codec.compress(torch.ones(3), absolute_bound=0.1)
    >>> codec.decompress(from_bytes(to_bytes(record))).shape
    torch.Size([3])
    """
    header = {
        "shape": record.shape,
        "strides": record.strides,
        "dtype": str(record.dtype).removeprefix("torch."),
        "pieces": [
            [p.coding, p.maps, p.half, p.signed, {n: t.nbytes for n, t in p.parts.items()}]
            for p in record.pieces
        ],
    }
    text = json.dumps(header).encode()
    buffers = [_raw(part) for piece in record.pieces for part in piece.parts.values()]
    body = b"".join([struct.pack("<I", len(text)), text, *buffers])
    return _MAGIC + struct.pack("<BI", _VERSION, zlib.crc32(body)) + body


def from_bytes(data: bytes) -> CompressedTensor:
    """The record that `to_bytes` wrote, on the CPU.

    Raises:
        InputError: it is another format or version, was truncated or damaged, or is inconsistent.
    """
    if len(data) < _START or data[: len(_MAGIC)] != _MAGIC:
        raise InputError("these bytes hold no tensor that modicum compressed")
    version, checksum, length = struct.unpack_from("<BII", data, len(_MAGIC))
    if version != _VERSION:
        raise InputError(
            "this compressed tensor is of another version; read it with the modicum that wrote it",
            value=version,
            allowed=str(_VERSION),
        )
    if zlib.crc32(data[_START - 4 :]) != checksum:
        raise InputError("this compressed tensor was truncated or damaged; copy it again")
    try:
        header = json.loads(data[_START : _START + length])
        return _record(header, memoryview(data)[_START + length :])
    except (KeyError, TypeError, ValueError, RuntimeError, zlib.error) as error:
        raise InputError(f"this compressed tensor contradicts itself: {error}") from None


def _record(header: dict[str, Any], buffers: memoryview) -> CompressedTensor:
    shape, strides = tuple(header["shape"]), tuple(header["strides"])
    dtype = _NAMES[header["dtype"]]
    if not is_dense(shape, strides) or min((*shape, *strides, 0)) < 0:
        raise ValueError(f"strides {strides} of a tensor {shape}")
    pieces, start = [], 0
    for coding, maps, half, signed, sizes in header["pieces"]:
        parts = {}
        for name, size in sizes.items():
            parts[name] = _tensor(buffers[start : start + size], size, _kind(name, dtype))
            start += size
        number, height, width = maps
        pieces.append(CodedMaps(coding, (number, height, width), float(half), bool(signed), parts))
        _check(pieces[-1])
    if start != len(buffers) or sum(piece.count for piece in pieces) != math.prod(shape):
        raise ValueError("its pieces do not make up the tensor")
    return CompressedTensor(shape, strides, dtype, torch.device("cpu"), tuple(pieces))


def _check(piece: CodedMaps) -> None:
    """Refuse a piece that could not be decoded.

    Raises:
        ValueError: says why.
    """
    parts, count = piece.parts, piece.count
    if piece.coding not in CODINGS or parts.keys() - _PARTS.get(piece.coding, _DENSE_PARTS):
        raise ValueError(f"a piece of coding {piece.coding!r} with {', '.join(parts)}")
    if min(piece.maps) < 1 or not (math.isfinite(piece.half) and piece.half >= 0):
        raise ValueError(f"a piece of {piece.maps} with bins of {piece.half}")
    if piece.coding == "raw":
        if len(parts["elements"]) != count:
            raise ValueError(f"{len(parts['elements'])} elements of {count}")
        return
    numbers = count
    if piece.coding == "sparse":
        if len(parts["mask"]) != -(-count // 8):
            raise ValueError(f"a mask of {len(parts['mask'])} bytes for {count} elements")
        numbers = int(unpack_bits(parts["mask"], count).sum())
    unpack_numbers(piece, numbers)
    if "places" in parts:
        places = parts["places"]
        if len(places) != len(parts["values"]) or places.min() < 0 or places.max() >= count:
            raise ValueError("elements out of place")


def _kind(name: str, dtype: torch.dtype) -> torch.dtype:
    if name in ("values", "elements"):
        return dtype
    return torch.int32 if name == "places" else torch.uint8


def _raw(tensor: Tensor) -> bytes:
    data: bytes = tensor.cpu().view(torch.uint8).numpy().tobytes()
    return data


def _tensor(data: memoryview, size: int, dtype: torch.dtype) -> Tensor:
    if len(data) != size:
        raise ValueError(f"{size} bytes are missing")
    if not size:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)
