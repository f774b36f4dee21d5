"""Files of rows, of whatever kind: one place that turns them into objects with their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from modicum.data.csv_rows import csv_rows
from modicum.data.json_list import json_rows
from modicum.data.json_rows import Row, json_lines

RowKind = Literal["jsonl", "json", "csv", "tsv"]
ROW_KINDS: tuple[RowKind, ...] = get_args(RowKind)


def rows_of(path: Path, kind: RowKind) -> Iterator[Row]:
    """The rows of a file, read as they are asked for.

    Raises:
        InputError: the file cannot be read as what it is; with the line or the row's number.
    """
    if kind in ("csv", "tsv"):
        return csv_rows(path, "," if kind == "csv" else "\t")
    return json_rows(path) if kind == "json" else json_lines(path)
