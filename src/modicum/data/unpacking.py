"""Files compressed with gzip or Zstandard, unpacked as they are read and found by first bytes."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from modicum.core.errors import InputError
from modicum.core.extras import library

PACKED_SUFFIXES = {".gz": "gzip", ".zst": "Zstandard"}
_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# So few packed bytes at a time make at most 4 MiB: a block of 128 KiB can be four bytes.
_PIECE = 128
# Frames that ask for a larger window than `zstd` unpacks without `--long` are refused.
_WINDOW = 1 << 27


@contextmanager
def unpacked(path: Path, handle: io.BufferedReader) -> Iterator[io.BufferedReader]:
    """What a file holds: its bytes, or those that they unpack to.

    Raises:
        InputError: it is truncated or damaged, or named as compressed and is not.
    """
    head = handle.peek(4)
    method = PACKED_SUFFIXES.get(path.suffix.lower())
    if head.startswith(_GZIP):
        with _checked(path, "gzip", zlib.error), gzip.GzipFile(fileobj=handle) as stream:
            yield io.BufferedReader(cast("io.RawIOBase", stream))
    elif head.startswith(_ZSTANDARD):
        zstandard = library("zstandard", "data", f"{path}: reading it")
        with _checked(path, "Zstandard", zstandard.ZstdError):
            yield io.BufferedReader(_Frames(handle, zstandard))
    elif method is not None:
        raise InputError(f"the file's name says {method}, and it does not begin so", file=path)
    else:
        yield handle


@contextmanager
def _checked(path: Path, method: str, damage: type[Exception]) -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise InputError(
            f"the file is compressed with {method} and truncated; fetch it again", file=path
        ) from error
    except (damage, gzip.BadGzipFile) as error:
        raise InputError(
            f"the file is compressed with {method} and damaged ({error}); fetch it again",
            file=path,
        ) from error


class _Frames(io.RawIOBase):
    """What Zstandard frames unpack to, one after the other.

    The library's own stream takes a truncated file for one that ends.
    """

    def __init__(self, handle: BinaryIO, zstandard: Any) -> None:
        self._handle, self._made = handle, memoryview(b"")
        self._new = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._made:
            packed = self._handle.read(_PIECE)
            if not packed and self._frame is not None:
                raise EOFError
            if not packed:
                return 0
            self._made = memoryview(b"".join(self._unpacked(packed)))
        size = min(len(buffer), len(self._made))
        buffer[:size], self._made = self._made[:size], self._made[size:]
        return size

    def _unpacked(self, packed: bytes) -> Iterator[bytes]:
        while packed:
            if self._frame is None:
                self._frame = self._new()
            yield self._frame.decompress(packed)
            packed = b""
            if self._frame.eof:
                packed, self._frame = self._frame.unused_data, None


def content_name(path: Path) -> Path:
    """The path as it would be called unpacked.

    >>> content_name(Path("rows.jsonl.gz")).name
    'rows.jsonl'
    """
    return path.with_suffix("") if path.suffix.lower() in PACKED_SUFFIXES else path
