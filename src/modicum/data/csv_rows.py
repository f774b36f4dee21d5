"""Rows of tables of comma- or tab-separated values, by the names in their header."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from modicum.core.errors import InputError, clipped
from modicum.data.json_rows import DataRow
from modicum.data.opening import LONGEST_ROW, lines_of, not_utf8, opened_text, too_long

# Columns that hold lists: a cell can hold them as JSON alone.
_LISTS = ("messages", "conversations")
_LONGEST_NAME = 100


def csv_rows(path: Path, delimiter: str) -> Iterator[DataRow]:
    """The rows below the header; all values are strings. Their number is that of their first line.

    Cells are quoted as RFC 4180 has it, and may hold line ends. Blank lines are no rows, and a
    first column without a name, which pandas writes, is left out. A cell of the columns `messages`
    and `conversations` that begins with `[` is JSON.

    Raises:
        InputError: the file is of another kind or not UTF-8, the first line is no header, or a row
            is not valid, too long, or has more or fewer cells than the header.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_ROW))
    with opened_text(path) as handle:
        lines = _Lines(path, handle)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        names: list[str] = []
        while True:
            line, before = lines.number + 1, lines.begin()
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise _not_valid(path, line, error) from error
            if cells is None:
                return
            if not cells:
                continue
            if not names:
                names = _header(path, line, cells, delimiter)
                continue
            if len(cells) != len(names):
                raise InputError(
                    f"the row has {len(cells)} cells and the header {len(names)}; a cell with "
                    "a delimiter or a line end in it is put in double quotes",
                    file=path,
                    line=line,
                )
            columns = _columns(path, line, dict(zip(names, cells, strict=True)))
            yield DataRow(line, columns, lines.offset - before)


class _Lines:
    """The lines of a file as text, counted as `csv` asks for them."""

    def __init__(self, path: Path, handle: io.BufferedReader) -> None:
        self._path, self._lines = path, lines_of(path, handle)
        self.number = self.offset = 0
        self.begin()

    def begin(self) -> int:
        """Where the row begins that is read next."""
        self._begun, self._first = self.offset, self.number + 1
        return self._begun

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        raw = next(self._lines)
        self.number += 1
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(self._path, self.number, self.offset + error.start, error) from error
        self.offset += len(raw)
        if self.offset - self._begun > 2 * LONGEST_ROW:  # and no cell of it is too long
            raise too_long(self._path, self._first, "row")
        return text.removeprefix("\ufeff") if self.number == 1 else text


def _not_valid(path: Path, line: int, error: csv.Error) -> InputError:
    why = str(error)
    if "field limit" in why or "unexpected end of data" in why:
        why = "a quoted cell does not end"
    return InputError(
        f"the row is not valid CSV: {why}; a cell that begins with a double quote ends with one, "
        "and those in it are doubled",
        file=path,
        line=line,
    )


def _header(path: Path, line: int, names: Sequence[str], delimiter: str) -> list[str]:
    """The names of the columns.

    Raises:
        InputError: they cannot be names.
    """
    found = [name.strip() for name in names]
    unnamed = int(not found[0] and len(found) > 1)  # pandas' column of row numbers
    why = next(filter(None, map(_odd, found[unnamed:])), None)
    if why is None and len(set(found)) < len(found):
        why = "a name stands twice"
    other = next((mark for mark in ";\t,|" if mark != delimiter and mark in found[0]), None)
    if why is None and len(found) == 1 and other is not None:
        why = f"its one name holds {other!r}, and columns are parted by {delimiter!r}"
    if why is not None:
        raise InputError(
            f"the first line of a table names its columns, and this one does not: {why}; write a "
            "header such as `prompt,completion` above the rows",
            file=path,
            line=line,
            value=clipped(delimiter.join(names), 80),
        )
    return found


def _odd(name: str) -> str | None:
    """Why a cell can be no name of a column."""
    if not name:
        return "a name is empty"
    if name.replace(".", "").replace("-", "").isdigit():
        return f"{name!r} is a number"
    if "\n" in name or len(name) > _LONGEST_NAME:
        return "a name is as long as a text"
    return None


def _columns(path: Path, line: int, cells: Mapping[str, str]) -> dict[str, object]:
    columns: dict[str, object] = {name: cell for name, cell in cells.items() if name}
    for name in _LISTS:
        cell = cells.get(name, "")
        if cell.lstrip().startswith("["):
            try:
                columns[name] = json.loads(cell)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"the cell is not valid JSON: {error}", file=path, line=line, field=name
                ) from error
    return columns
