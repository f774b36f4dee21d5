"""Which files of a folder are meant: walking it in one order, and globs over relative names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path


def matches(name: str, pattern: str) -> bool:
    """Whether a glob takes a relative name; both are written with `/`.

    >>> matches("asyncio/events.py", "asyncio/**"), matches("asyncio/events.py", "*.py")
    (True, False)
    """
    return _matches(name.split("/"), [part for part in pattern.split("/") if part not in ("", ".")])


def _matches(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return True  # the pattern named the file, or a folder above it
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts)))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def walk(root: Path, leave_out: Sequence[str] = ()) -> list[tuple[str, Path]]:
    """Name and path of every regular file, in the order of names.

    Hidden files and folders, and those whose own name a glob of `leave_out` takes, are passed by.
    """

    def wanted(name: str) -> bool:
        return not name.startswith((".", "__pycache__")) and not any(
            fnmatchcase(name, glob) for glob in leave_out
        )

    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = filter(wanted, folders)
        found += [Path(folder, name) for name in filter(wanted, names)]
    return sorted((path.relative_to(root).as_posix(), path) for path in found if path.is_file())


def chosen_by(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether some glob of `include` takes `name`, or there is none, and none of `exclude`."""
    return any(matches(name, glob) for glob in include or ("**",)) and not any(
        matches(name, glob) for glob in exclude
    )
