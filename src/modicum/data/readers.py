"""Documents out of one file: plain text, Python source, rows. Knows nothing of folders."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from modicum.core.errors import InputError
from modicum.data.json_rows import DataRow, kind_name
from modicum.data.opening import not_utf8, opened, opened_text
from modicum.data.talks import Talk


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
        talk: the conversation that the text was written from.
    """

    text: str
    prompt: str | None
    origin: str
    size: int
    spans: tuple[tuple[int, int], ...] | None = None
    talk: Talk | None = None

    @property
    def blank(self) -> bool:
        """Whether there is nothing to train in it: such documents are left out."""
        return not self.text or self.text.isspace()


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
                raise not_utf8(path, at_line, offset + error.start, error) from error
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


class Unmade(NamedTuple):
    """A document that is read and not yet made: no template has written it.

    Args:
        size: bytes of the file that were read for it.
        make: makes it; raises InputError where its row is not as it should be.
        state: of a data set of the hub, gives its state after this row; asked before the next one.
    """

    size: int
    make: Callable[[], Document]
    state: Callable[[], dict[str, Any] | None] = lambda: None

    @classmethod
    def of(cls, document: Document) -> Unmade:
        """One that is made already."""
        return cls(document.size, lambda: document)


def read_rows(
    rows: Iterable[DataRow],
    path: Path | None,
    name: str,
    document: Callable[[Mapping[str, Any], str, int], Document],
) -> Iterator[Unmade]:
    """The rows of a file, each to be made into a document with its origin and size.

    Args:
        path: that messages name, with the row; None: they name `name`.

    Raises:
        InputError: `rows` raises it; what it makes raises it where `document` refuses a row.
    """
    for row in rows:

        def made(row: DataRow = row) -> Document:
            try:
                return document(row.columns, f"{name}:{row.number}", row.size)
            except InputError as error:
                raise error.located(file=path or name, line=row.number) from None

        yield Unmade(row.size, made)


def string_of(row: Mapping[str, object], column: str) -> str:
    """The string in a column of a row.

    Raises:
        InputError: there is no such column, or it holds something else; with those that are there.
    """
    if column not in row:
        raise InputError(
            "the row has no such column",
            field=column,
            allowed="the columns that it has: " + (", ".join(map(repr, row)) or "none"),
            candidates=row,
            word=column,
        )
    value = row[column]
    if not isinstance(value, str):
        raise InputError(
            f"the column holds {kind_name(value)}",
            field=column,
            value=value,
            allowed="a string",
        )
    return check_text(value, column)


def check_text(text: str, field: str | None = None) -> str:
    """The text itself, if UTF-8 can hold it: JSON may spell half a surrogate pair.

    Raises:
        InputError: it has one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start} is half a surrogate pair, which no text can hold",
            field=field,
            value=text[error.start],
        ) from error
    return text
