"""Texts with one label each, out of rows of any kind, and which classes there are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from modicum.core.errors import InputError
from modicum.data.json_rows import DataRow, kind_name
from modicum.data.readers import check_text
from modicum.data.row_files import rows_of
from modicum.data.sources import Source

_INTEGER = re.compile(r"-?[0-9]{1,18}")


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
    return _checked(value, row, column, path)


def _label(row: DataRow, column: str, path: Path) -> int | str:
    value = _value(row, column, path)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.strip():
        return _checked(value, row, column, path)
    if isinstance(value, int):
        return value
    raise InputError(
        f"must be a name or an integer, and is {kind_name(value)}",
        file=path,
        line=row.number,
        field=column,
        value=value,
    )


def _checked(text: str, row: DataRow, column: str, path: Path) -> str:
    try:
        return check_text(text, column)
    except InputError as error:
        raise error.located(file=path, line=row.number) from None


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

    Where all labels are integers, or spell them, they are sorted by value.

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
    found = {str(row.label): _integer(row.label) for row in rows}
    numbers = {name: number for name, number in found.items() if number is not None}
    if len(numbers) == len(found):
        names = tuple(sorted(numbers, key=lambda name: (numbers[name], name)))
    else:
        names = tuple(sorted(found))
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
    place = _place(row.label, names) if listed else None
    if place is not None:
        return place
    raise InputError(
        f"{row.origin} has a label that is none of the classes",
        value=row.label,
        allowed=", ".join(names),
        candidates=names,
        word=str(row.label),
    )


def _integer(label: int | str) -> int | None:
    """The integer that a label is, or spells, as in a CSV file; None of any other name."""
    if isinstance(label, int):
        return label
    return int(label) if _INTEGER.fullmatch(label) else None


def _place(label: int | str, names: Sequence[str]) -> int | None:
    """The place in the names that a label gives; None where it gives none.

    An integer gives none where a name spells another place than its own: of the names 1, 2 and 3,
    0 would be the first, and 1 too. One that is spelled gives a place where no name spells an
    integer, and is `1` then and not `01`.
    """
    number = _integer(label)
    if number is None or not 0 <= number < len(names):
        return None
    apart, words = _spelling(tuple(names))
    if isinstance(label, int):
        return number if apart else None
    return number if label == str(number) and words else None


@lru_cache(maxsize=8)  # as it looks at all names, and every row asks
def _spelling(names: tuple[str, ...]) -> tuple[bool, bool]:
    """Whether no name spells the place of another, and whether none spells an integer at all."""
    spelled = {_integer(name): place for place, name in enumerate(names)}
    apart = all(spelled.get(place, place) == place for place in range(len(names)))
    return apart, set(spelled) == {None}
