"""The bytes of files: opened, looked at for what they are, read line by line in bounded memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.units import format_bytes
from modicum.data.kinds import HEAD, refuse_other_kinds
from modicum.data.unpacking import unpacked

# No line or row is longer: without a bound, a file without line ends would fill the memory.
LONGEST_ROW = 64_000_000


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, or one clear message why they cannot be had."""
    try:
        with open(path, "rb") as handle:
            yield handle
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from error


@contextmanager
def opened_text(path: Path) -> Iterator[io.BufferedReader]:
    """The same unpacked, of a file that does not begin as another kind of file does."""
    with opened(path) as handle, unpacked(path, handle) as content:
        refuse_other_kinds(path, content.peek(HEAD)[:HEAD])
        yield content


def content_bytes(path: Path) -> int:
    """About how many bytes a file unpacks to, by its first mebibyte; exact where that is all.

    Raises:
        InputError: it cannot be read, or does not unpack.
    """
    most, size = 1 << 20, path.stat().st_size
    with opened(path) as handle, unpacked(path, handle) as stream:
        if stream is handle:
            return size
        made = len(stream.read(most))
        return made if made < most else max(made, made * size // max(handle.tell(), 1))


def lines_of(path: Path, handle: io.BufferedReader) -> Iterator[bytes]:
    """The lines of a file, with their ends.

    Raises:
        InputError: one is longer than `LONGEST_ROW`.
    """
    number = 0
    while raw := handle.readline(LONGEST_ROW + 1):
        number += 1
        if len(raw) > LONGEST_ROW:
            raise too_long(path, number, "line")
        yield raw


def too_long(path: Path, number: int, what: str) -> InputError:
    """The refusal of a line or row that is longer than `LONGEST_ROW`."""
    most = format_bytes(LONGEST_ROW)
    return InputError(f"the {what} is longer than {most}, the most allowed", file=path, line=number)


def not_utf8(path: Path, line: int, offset: int, error: UnicodeDecodeError) -> InputError:
    """The refusal of bytes that are not UTF-8, at `offset` of the file."""
    byte = error.object[error.start]
    return InputError(
        f"byte 0x{byte:02x} at offset {offset} is not UTF-8; convert the file to UTF-8, for "
        f"instance with `iconv -f latin1 -t utf-8`",
        file=path,
        line=line,
    )
