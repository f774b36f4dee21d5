"""Rows of a JSON file that is one list of objects, read piece by piece."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from pathlib import Path

from modicum.core.errors import InputError
from modicum.data.json_rows import DataRow, json_lines, kind_name
from modicum.data.kinds import HEAD
from modicum.data.opening import LONGEST_ROW, not_utf8, opened_text, too_long

_BLOCK = 1 << 16
_SPACE = " \t\r\n"
# An error so near to the end of what was read may be the end's: a truncated word or escape.
_NEAR = 16


def json_rows(path: Path) -> Iterator[DataRow]:
    """The objects of a `.json` file: those of one list, or an object a line.

    Raises:
        InputError: the file is of another kind, or a row is not UTF-8, not JSON, or no object.
    """
    with opened_text(path) as handle:
        head = handle.peek(HEAD).removeprefix(codecs.BOM_UTF8).lstrip()
    return json_list(path) if head.startswith(b"[") else json_lines(path)


def json_list(path: Path) -> Iterator[DataRow]:
    """The objects of a list, numbered from 1.

    Raises:
        InputError: as `json_rows` says; with the number of the row.
    """
    with opened_text(path) as handle:
        text = _Text(path, handle)
        text.take("[")
        while text.next() != "]":
            text.row += 1
            if text.row > 1:
                text.take(",")
            value, size = text.value()
            if not isinstance(value, dict):
                raise text.wrong(f"the row is {kind_name(value)}, not an object")
            yield DataRow(text.row, value, size)
        text.take("]")
        if text.next():
            raise text.wrong("something follows after the list")


class _Text:
    """The text of a file from some place on; more of it is read when it is needed.

    Attributes:
        row: the number of the row that is read.
    """

    def __init__(self, path: Path, handle: io.BufferedReader) -> None:
        self._path, self._handle = path, handle
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text, self._at = "", 0
        self._line, self._offset, self._ended = 1, 0, False
        self.row = 0

    def wrong(self, problem: str) -> InputError:
        """The refusal of the row that is read."""
        line = self._line + self._text.count("\n", 0, self._at)
        where = f"{problem} (line {line} of the file)"
        return InputError(where, file=self._path, line=max(self.row, 1))

    def next(self) -> str:
        """The next character that is no space; none at the end."""
        while True:
            rest = len(self._text)
            while self._at < rest and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < rest:
                return self._text[self._at]
            if self._ended:
                return ""
            self._more(_BLOCK)

    def take(self, mark: str) -> None:
        """Pass by a mark.

        Raises:
            InputError: something else is there.
        """
        found = self.next()
        if not found:
            raise self.wrong("the list does not end: the file is truncated")
        if found != mark:
            raise self.wrong(f"the list is not valid JSON: {found!r} where {mark!r} is expected")
        self._at += 1

    def value(self) -> tuple[object, int]:
        """The next value, and its bytes.

        Raises:
            InputError: it is not JSON, or too long.
        """
        self.next()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
                break
            except (ValueError, RecursionError) as error:
                if not self._incomplete(error):
                    raise self._not_json(error) from error
            if len(self._text) - self._at > LONGEST_ROW:
                raise too_long(self._path, self.row, "row")
            self._more(max(_BLOCK, len(self._text) - self._at))
        size = len(self._text[self._at : end].encode())
        self._at = end
        return value, size

    def _incomplete(self, error: ValueError | RecursionError) -> bool:
        """Whether what was read is no JSON only because it is not all."""
        if self._ended or not isinstance(error, json.JSONDecodeError):
            return False
        near = error.pos >= len(self._text) - _NEAR
        return near or error.msg.startswith("Unterminated string")

    def _not_json(self, error: ValueError | RecursionError) -> InputError:
        if not isinstance(error, json.JSONDecodeError):  # a number of thousands of digits is none
            return self.wrong(f"the row is not valid JSON: {error}")
        self._at = error.pos
        if self._ended and error.pos >= len(self._text.rstrip()):
            return self.wrong("the list does not end: the file is truncated")
        return self.wrong(f"the row is not valid JSON: {error.msg.removesuffix(' at')}")

    def _more(self, size: int) -> None:
        kept = len(self._utf8.getstate()[0])
        raw = self._handle.read(size)
        try:
            new = self._utf8.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            offset = self._offset - kept + error.start
            raise not_utf8(self._path, max(self.row, 1), offset, error) from error
        self._offset += len(raw)
        self._line += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :] + new, 0
        self._ended = not raw
