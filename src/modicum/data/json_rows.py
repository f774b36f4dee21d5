"""Rows of JSON lines: an object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from modicum.core.errors import InputError
from modicum.data.opening import lines_of, not_utf8, opened_text

_KINDS = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
_KINDS |= {bool: "true or false", type(None): "null"}


class DataRow(NamedTuple):
    """A row of a file.

    Args:
        number: its first line, or its own number where rows are no lines; from 1.
        columns: name -> value.
        size: bytes that were read for it.
    """

    number: int
    columns: dict[str, object]
    size: int


def kind_name(value: object) -> str:
    """What a value is, in the words of JSON.

    >>> kind_name([]), kind_name(b"")
    ('a list', 'a value of type bytes')
    """
    return _KINDS.get(type(value), f"a value of type {type(value).__name__}")


def json_lines(path: Path, *, skip: int = 0) -> Iterator[DataRow]:
    """The objects of a JSONL file; blank lines are none.

    Args:
        skip: so many are passed by first, and not parsed.

    Raises:
        InputError: the file is of another kind, or a line is not UTF-8, not JSON, or no object.
    """
    offset = 0
    with opened_text(path) as handle:
        for number, raw in enumerate(lines_of(path, handle), start=1):
            if raw.strip() and skip:
                skip -= 1
            elif raw.strip():
                yield DataRow(number, _parsed(path, number, raw, offset), len(raw))
            offset += len(raw)


def _parsed(path: Path, number: int, raw: bytes, offset: int) -> dict[str, object]:
    try:
        line = raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise not_utf8(path, number, offset + error.start, error) from error
    except (ValueError, RecursionError) as error:
        why = str(error)
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg.removesuffix(' at')} (column {error.colno})"
        if number == 1 and line.lstrip().startswith(("[", "{")) and len(line.strip()) == 1:
            why = (
                "the file is one JSON value over many lines; write one object a line, or a list "
                "of objects in a file that is named .json"
            )
        raise InputError(f"the line is not valid JSON: {why}", file=path, line=number) from error
    if not isinstance(row, dict):
        raise InputError(f"the line holds {kind_name(row)}, not an object", file=path, line=number)
    return row
