"""What stands in a run folder, read as what it should be; what is something else is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import read_bytes

# By the name of a value, the types that it may have.
Types = Mapping[str, type | tuple[type, ...]]
_MEND = "put back what was there, or give --out a new folder"


def check_kinds(folder: Path, files: Collection[str], folders: Collection[str]) -> None:
    """Make sure that what is there is a regular file or a folder, as its name says.

    Raises:
        InputError: a file stands where a folder should, or the other way round; or it is neither.
    """
    for name in (*files, *folders):
        path, wanted = folder / name, "a file" if name in files else "a folder"
        if path.exists() and not (path.is_file() if name in files else path.is_dir()):
            found = "a folder" if path.is_dir() else "a file" if path.is_file() else "neither"
            raise InputError(f"must be {wanted}, and is {found}; move it away", file=path)


def read_object(path: Path, types: Types) -> dict[str, Any] | None:
    """The JSON object in a file; None where it is none, or a value in it has another type."""
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and fits(value, types) else None


def damaged_record(path: Path) -> InputError:
    """The error of a record that cannot be read."""
    return InputError(f"is damaged: not the JSON that a run writes; {_MEND}", file=path)


def read_rows(path: Path, types: Types) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; a last one that a process left half written is left out.

    Raises:
        InputError: another line is no such row.
    """
    rows = []
    *lines, last = read_bytes(path).split(b"\n")
    for number, line in enumerate([*lines, last], start=1):
        row = _row(line, types)
        if row is not None:
            rows.append(row)
        # Half a row begins as rows do; after a loss of power there may be zeros.
        elif line.strip(b"\0 \r\t") and not (number > len(lines) and line.startswith(b"{")):
            problem = f"is damaged: this line is no row that a run writes; {_MEND}"
            raise InputError(problem, file=path, line=number)
    return rows


def _row(line: bytes, types: Types) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    complete = isinstance(row, dict) and types.keys() <= row.keys()
    return row if complete and fits(row, types) else None


def fits(values: Mapping[str, Any], types: Types) -> bool:
    """Whether the values that are there have the types that they may have."""
    return all(isinstance(values[name], kind) for name, kind in types.items() if name in values)
