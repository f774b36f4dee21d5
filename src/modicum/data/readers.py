"""Documents out of one file: plain text, Python source, JSON lines. Knows nothing of folders."""

from __future__ import annotations

import io
import json
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from modicum.core.errors import InputError
from modicum.data.kinds import HEAD, refuse_other_kinds

_KINDS = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
_KINDS |= {bool: "true or false", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Document:
    """One text to train on.

    Args:
        text: what is trained.
        prompt: what stands before it and is not trained, or None.
        origin: where it came from, for people: a file's name, with a line if it has several.
        size: bytes of the file that were read for it.
        spans: of a conversation, the characters [start, end) of the text that are trained; None
            where all of it is.
    """

    text: str
    prompt: str | None
    origin: str
    size: int
    spans: tuple[tuple[int, int], ...] | None = None

    @property
    def blank(self) -> bool:
        """Whether there is nothing to train in it: such documents are left out."""
        return not self.text or self.text.isspace()


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
    """The same of a file that does not begin as another kind of file does."""
    with opened(path) as handle:
        refuse_other_kinds(path, handle.peek(HEAD)[:HEAD])
        yield handle


def read_text(path: Path, name: str, piece_bytes: int) -> Iterator[Document]:
    """A UTF-8 text file: one document, or several of about `piece_bytes` when it is longer.

    Pieces end after a blank line if there is one in their second half, else after a line, else
    after a word, so a file of any length is read in bounded memory.

    Raises:
        InputError: the file is not UTF-8 (the line and the byte's offset are named), or of another
            kind.
    """
    offset, line, rest = 0, 1, b""
    with opened_text(path) as handle:
        while block := rest + handle.read(piece_bytes + 1 - len(rest)):
            cut = len(block) if len(block) <= piece_bytes else _place_to_cut(block)
            piece, rest = block[:cut], block[cut:]
            try:
                text = piece.decode("utf-8")
            except UnicodeDecodeError as error:
                at_line = line + piece.count(b"\n", 0, error.start)
                raise _not_utf8(path, at_line, offset + error.start, error) from error
            origin = f"{name}:{line}" if offset else name
            yield Document(text if offset else text.removeprefix("\ufeff"), None, origin, cut)
            offset += cut
            line += piece.count(b"\n")


def _place_to_cut(block: bytes) -> int:
    for mark in (b"\n\n", b"\n", b" "):
        found = block.rfind(mark, len(block) // 2, -1)
        if found >= 0:
            return found + len(mark)
    cut = len(block) - 1
    while cut > len(block) - 4 and block[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
        cut -= 1
    return cut


def read_python(path: Path, name: str) -> Iterator[Document]:
    """A Python file in the encoding that it declares; nothing when that does not decode."""
    with opened(path) as handle:
        raw = handle.read()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        yield Document(raw.decode(encoding), None, name, len(raw))
    except (SyntaxError, UnicodeDecodeError):
        return


def read_jsonl(
    path: Path, name: str, document: Callable[[dict[str, object], str, int], Document]
) -> Iterator[Document]:
    """One JSON object a line, each made into a document with its origin and size.

    Raises:
        InputError: the file is of another kind; a line is not UTF-8, not JSON, no object, or
            `document` refuses it; the line is named.
    """
    for number, row, size in json_rows(path):
        try:
            yield document(row, f"{name}:{number}", size)
        except InputError as error:
            raise error.located(file=path, line=number) from None


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, object], int]]:
    """The objects of a JSONL file, each with its line's number and bytes; blank lines are none.

    Raises:
        InputError: the file is of another kind, or a line is not UTF-8, not JSON, or no object.
    """
    offset = 0
    with opened_text(path) as handle:
        for number, raw in enumerate(handle, start=1):
            if raw.strip():
                yield number, _parse(path, number, raw, offset), len(raw)
            offset += len(raw)


def _parse(path: Path, number: int, raw: bytes, offset: int) -> dict[str, object]:
    try:
        line = raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, number, offset + error.start, error) from error
    except (ValueError, RecursionError) as error:
        why = str(error)
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg.removesuffix(' at')} (column {error.colno})"
        if number == 1 and line.lstrip().startswith(("[", "{")) and len(line.strip()) == 1:
            why = "the file is one JSON value over many lines; write one object a line instead"
        raise InputError(f"the line is not valid JSON: {why}", file=path, line=number) from error
    if not isinstance(row, dict):
        kind = _KINDS[type(row)]
        raise InputError(f"the line holds {kind}, not an object", file=path, line=number)
    return row


def string_of(row: Mapping[str, object], column: str) -> str:
    """The string in a column of a row.

    Raises:
        InputError: there is no such column, or it holds something else; with those that are there.
    """
    if column not in row:
        raise InputError(
            "the line has no such column",
            field=column,
            allowed="the columns that it has: " + (", ".join(map(repr, row)) or "none"),
            candidates=row,
            word=column,
        )
    value = row[column]
    if not isinstance(value, str):
        raise InputError(
            f"the column holds {_KINDS[type(value)]}",
            field=column,
            value=value,
            allowed="a string",
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start} is half a surrogate pair, which no text can hold",
            field=column,
            value=value[error.start],
        ) from error
    return value


def _not_utf8(path: Path, line: int, offset: int, error: UnicodeDecodeError) -> InputError:
    byte = error.object[error.start]
    return InputError(
        f"byte 0x{byte:02x} at offset {offset} is not UTF-8; convert the file to UTF-8, for "
        f"instance with `iconv -f latin1 -t utf-8`",
        file=path,
        line=line,
    )
