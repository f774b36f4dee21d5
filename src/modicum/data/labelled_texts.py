"""Texts with one label each, out of rows of any kind, and which classes there are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from modicum.core.errors import InputError
from modicum.data.json_rows import DataRow, kind_name
from modicum.data.row_files import rows_of
from modicum.data.sources import Source


@dataclass(frozen=True, slots=True)
class LabelledText:
    """One row.

    Args:
        texts: one, or the two of a pair.
        label: as the data spells it: an integer, or a name.
        origin: the file's name and the line, for people.
    """

    texts: tuple[str, ...]
    label: int | str
    origin: str


def read_labelled(
    source: Source, text_columns: Sequence[str], label_column: str
) -> Iterator[LabelledText]:
    """The rows of a source's files, within its limit of bytes.

    Raises:
        InputError: a file has no rows, or a row lacks a column or holds something else in it.
    """
    asked = {*text_columns, label_column}
    done, found = 0, False

    def used(names: Collection[str]) -> set[str] | None:
        return asked if asked.issubset(names) else None  # else the refusal names those there are

    for file in source.files:
        if file.row_kind is None:
            raise InputError(
                "text files have no labels; give rows with a text and a label each, as in JSONL, "
                "CSV or Parquet",
                file=file.path,
            )
        for row in rows_of(file.path, file.row_kind, used=used):
            done += row.size
            if source.limit_bytes is not None and done > source.limit_bytes and found:
                return
            found = True
            texts = tuple(_text(row, name, file.path) for name in text_columns)
            label = _label(row, label_column, file.path)
            yield LabelledText(texts, label, f"{file.name}:{row.number}")
    if not found:
        raise InputError("there are no rows in it", file=source.title)


def _text(row: DataRow, column: str, path: Path) -> str:
    value = _value(row, column, path)
    if not isinstance(value, str):
        raise InputError(
            f"must be text, and is {kind_name(value)}", file=path, line=row.number, field=column
        )
    return value


def _label(row: DataRow, column: str, path: Path) -> int | str:
    value = _value(row, column, path)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, str) and value.strip()):
        return value
    raise InputError(
        f"must be a name or an integer, and is {kind_name(value)}",
        file=path,
        line=row.number,
        field=column,
        value=value,
    )


def _value(row: DataRow, column: str, path: Path) -> object:
    if column not in row.columns:
        raise InputError(
            "the row has no such column",
            file=path,
            line=row.number,
            field=column,
            allowed=", ".join(row.columns),
            candidates=row.columns,
            word=column,
        )
    return row.columns[column]


def class_names(rows: Sequence[LabelledText], asked: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of the classes, in the order of their numbers: those asked for, else sorted.

    Raises:
        InputError: there are fewer than two.

    >>> class_names([LabelledText(("",), label, "") for label in (10, 9, 10)])
    ('9', '10')
    """
    if asked:
        if not len(asked) == len(set(asked)) >= 2:
            raise InputError(
                "are to be two or more different names",
                field="task.classes",
                value=", ".join(asked),
            )
        return tuple(asked)
    found = {row.label for row in rows}
    if all(isinstance(label, int) for label in found):
        names = tuple(map(str, sorted(found, key=int)))
    else:
        names = tuple(sorted({str(label) for label in found}))
    if len(names) < 2:
        raise InputError(
            "all rows have the same label, and at least two classes are needed",
            value=names[0],
        )
    return names


def numbered(row: LabelledText, names: Sequence[str], *, listed: bool = False) -> int:
    """The number of a row's class.

    Args:
        listed: whether a recipe lists the names, so that an integer may be a place in them.

    Raises:
        InputError: it is of no class.
    """
    if str(row.label) in names:
        return names.index(str(row.label))
    if listed and isinstance(row.label, int) and 0 <= row.label < len(names):
        return row.label
    raise InputError(
        f"{row.origin} has a label that is none of the classes",
        value=row.label,
        allowed=", ".join(names),
        candidates=names,
        word=str(row.label),
    )
