"""Writes a run's `report.html`, and the page that lays several runs over each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modicum.core import files
from modicum.core.errors import InputError
from modicum.report.folder import checked, read
from modicum.report.page import render

_OURS = '<meta name="generator" content="modicum'


def write(folder: str | Path) -> Path:
    """Write `report.html` into a run folder, atomically, and return its path.

    The run may have finished, failed, been interrupted, or be running; the page says which.

    Raises:
        InputError: there is no such run folder, its disk is full or read-only, or what writes the
            page is not installed.
    """
    return _write([folder], Path(folder) / "report.html")


def compare(folders: Sequence[str | Path], target: str | Path) -> Path:
    """Write one page that lays several runs over each other, atomically, and return its path.

    Args:
        folders: run folders, each once.
        target: the page; an earlier one is replaced, another file is not.

    Raises:
        InputError: there is no such run folder, one is named twice, `target` is another file, or
            what writes the page is not installed.
    """
    seen: dict[Path, str | Path] = {}
    for folder in folders:
        if (place := checked(folder).resolve()) in seen:
            raise InputError("this run is named twice", file=Path(folder))
        seen[place] = folder
    path = Path(target)
    refuse_others(path)
    return _write(folders, path)


def refuse_others(path: Path) -> None:
    """Refuse to replace what is no page of ours.

    Raises:
        InputError: the file is there and is none, or its folder is not there.
    """
    if not path.parent.is_dir():
        raise InputError("there is no such folder to write into", file=path.parent)
    if path.exists() and _OURS.encode() not in files.read_bytes(path, 5000):
        raise InputError(
            "is another file, which is left alone; give a new name with --out", file=path
        )


def _write(folders: Sequence[str | Path], target: Path) -> Path:
    try:
        page = render([read(folder) for folder in folders])
    except ModuleNotFoundError as error:
        raise InputError(
            f"the report needs {error.name}; install it with: pip install 'modicum[cli]'"
        ) from error
    files.write_text(target, page)
    return target
