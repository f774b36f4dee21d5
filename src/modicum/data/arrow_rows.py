"""Rows of Parquet and Arrow files, by pyarrow, some at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.data.json_rows import DataRow
from modicum.data.opening import opened

# Of the columns that a file has, those that are used; None: all, for messages to name.
UsedColumns = Callable[[Sequence[str]], Collection[str] | None]
# So many rows are values of Python at a time.
_ROWS = 256
# An Arrow file begins so; Arrow's stream, which `datasets` saves, does not.
_ARROW_FILE = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def parquet_rows(
    path: Path, *, skip: int = 0, used: UsedColumns | None = None
) -> Iterator[DataRow]:
    """The rows of a Parquet file, numbered from 1; lists and structs are lists and objects.

    A field of a struct that is null is left out, since all structs of a column have all fields. The
    size of a row is that of its JSON.

    Args:
        skip: so many rows are passed by; row groups among them are not read.
        used: the columns that are read; None: all.

    Raises:
        InputError: the file is damaged or no Parquet, or pyarrow is not installed.
    """
    with _reading(path, "Parquet"), _parquet(path) as file:
        groups, before = range(file.num_row_groups), 0
        while groups and before + (held := file.metadata.row_group(groups[0]).num_rows) <= skip:
            groups, before = groups[1:], before + held
        names = file.schema_arrow.names
        _refuse_twins(path, names)
        # pyarrow takes a dot in a name for a path to a field of a struct.
        wanted = None if used is None or any("." in name for name in names) else used(names)
        columns = None if wanted is None else [name for name in names if name in wanted]
        batches = file.iter_batches(
            _ROWS, row_groups=list(groups), columns=columns, use_threads=False
        )
        yield from _rows(path, batches, before, skip)


def arrow_rows(path: Path, *, skip: int = 0) -> Iterator[DataRow]:
    """The rows of an Arrow file or stream, as those of `parquet_rows`.

    Raises:
        InputError: the file is damaged or no Arrow, or pyarrow is not installed.
    """
    with opened(path) as handle, _reading(path, "Arrow") as pyarrow:
        yield from _rows(path, _batches(pyarrow, path, handle), 0, skip)


def parquet_bytes(path: Path, used: UsedColumns | None = None) -> int:
    """About how many bytes the rows of a Parquet file have as JSON, by the first of them.

    Raises:
        InputError: as `parquet_rows` says.
    """
    size = _mean_size(parquet_rows(path, used=used))
    with _reading(path, "Parquet"), _parquet(path) as file:
        return round(size * file.metadata.num_rows)


def arrow_bytes(path: Path) -> int:
    """The same of an Arrow file or stream; its batches are mapped to be counted, and not read.

    Raises:
        InputError: as `arrow_rows` says.
    """
    size = _mean_size(arrow_rows(path))
    with _reading(path, "Arrow") as pyarrow, pyarrow.memory_map(str(path)) as mapped:
        return round(size * sum(batch.num_rows for batch in _batches(pyarrow, path, mapped)))


def _mean_size(rows: Iterator[DataRow]) -> float:
    sizes = [row.size for row in islice(rows, _ROWS)]
    return sum(sizes) / max(len(sizes), 1)


def _batches(pyarrow: Any, path: Path, handle: Any) -> Iterator[Any]:
    """The record batches of an Arrow file or stream that is open for reading."""
    with opened(path) as beginning:
        is_file = beginning.read(len(_ARROW_FILE)) == _ARROW_FILE
    if is_file:
        file = pyarrow.ipc.open_file(handle)
        return (file.get_batch(place) for place in range(file.num_record_batches))
    batches = iter(pyarrow.ipc.open_stream(handle))
    _check_end(path)
    return batches


def _parquet(path: Path) -> Any:
    module = library("pyarrow.parquet", "data", f"{path}: reading it")
    return module.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16)


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[Any]:
    """The library, whose errors name the file."""
    with opened(path):
        pass
    pyarrow = library("pyarrow", "data", f"{path}: reading it")
    library("pyarrow.ipc", "data", f"{path}: reading it")
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError) as error:
        why = str(error).rstrip(".")
        raise InputError(
            f"the file cannot be read as {kind} ({why}); it is damaged, or of another kind",
            file=path,
        ) from error


def _check_end(path: Path) -> None:
    """Refuse a stream that stops between two batches, which pyarrow takes for its end."""
    with opened(path) as handle:
        handle.seek(-len(_STREAM_END), 2)
        if handle.read() != _STREAM_END:
            raise InputError("the Arrow stream does not end: the file is truncated", file=path)


def _rows(path: Path, batches: Iterator[Any], number: int, skip: int) -> Iterator[DataRow]:
    """The rows of batches, before which there are `number` rows, after the first `skip` of all."""
    for batch in batches:
        _refuse_twins(path, batch.schema.names)
        passed = min(max(skip - number, 0), batch.num_rows)
        batch, number = batch.slice(passed), number + passed
        for start in range(0, batch.num_rows, _ROWS):
            part = batch.slice(start, _ROWS)
            try:
                rows = part.to_pylist()
            except UnicodeDecodeError as error:
                raise InputError(
                    f"a string in this row or the {_ROWS - 1} after it is not UTF-8",
                    file=path,
                    line=number + 1,
                ) from error
            except (ValueError, OverflowError) as error:  # such as a date after the year 9999
                raise InputError(
                    f"a value in this row or the {_ROWS - 1} after it cannot be read ({error})",
                    file=path,
                    line=number + 1,
                ) from error
            for row in rows:
                number += 1
                yield row_of(number, row)


def row_of(number: int, row: Mapping[str, Any]) -> DataRow:
    """A row of a table, without what is null in its structs; its size is that of its JSON."""
    columns = {name: _without_nulls(value) for name, value in row.items()}
    return DataRow(number, columns, len(json.dumps(columns, default=str).encode()))


def _refuse_twins(path: Path, names: list[str]) -> None:
    twin = next((name for name in names if names.count(name) > 1), None)
    if twin is not None:
        raise InputError("two columns have this name", file=path, field=twin)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value
