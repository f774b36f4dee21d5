"""Files of rows, of whatever kind: one place that turns them into objects with their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from modicum.data.arrow_rows import (
    UsedColumns,
    arrow_bytes,
    arrow_rows,
    parquet_bytes,
    parquet_rows,
)
from modicum.data.csv_rows import csv_rows
from modicum.data.json_list import json_rows
from modicum.data.json_rows import DataRow, json_lines
from modicum.data.opening import content_bytes

RowKind = Literal["jsonl", "json", "csv", "tsv", "parquet", "arrow"]
ROW_KINDS: tuple[RowKind, ...] = get_args(RowKind)


def rows_of(
    path: Path, kind: RowKind, *, skip: int = 0, used: UsedColumns | None = None
) -> Iterator[DataRow]:
    """The rows of a file, read as they are asked for.

    Args:
        skip: so many rows are passed by first; of JSONL, Parquet and Arrow they are not parsed.
        used: of a Parquet file, the columns that are read; None: all.

    Raises:
        InputError: the file cannot be read as what it is; with the line or the row's number.
    """
    if kind == "parquet":
        return parquet_rows(path, skip=skip, used=used)
    if kind == "arrow":
        return arrow_rows(path, skip=skip)
    if kind == "jsonl":
        return json_lines(path, skip=skip)
    rows = json_rows(path) if kind == "json" else csv_rows(path, "," if kind == "csv" else "\t")
    return islice(rows, skip, None)


def bytes_of(path: Path, kind: str, used: UsedColumns | None = None) -> int:
    """About how many bytes reading a file gives: of a compressed one, what it unpacks to.

    Raises:
        InputError: it cannot be read.
    """
    if kind == "arrow":
        return arrow_bytes(path)
    return parquet_bytes(path, used) if kind == "parquet" else content_bytes(path)
