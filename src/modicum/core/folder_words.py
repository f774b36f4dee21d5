"""What is in a folder, for whoever gave it where a file is expected."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_MOST = 6  # files that are named


def holds(folder: Path, endings: Iterable[str], what: str = "file") -> str:
    """Which files of these endings are in a folder, as the end of a sentence.

    Nothing where there are none, or where the folder cannot be read.

    Args:
        what: what such a file is called.
    """
    known = tuple(endings)
    try:
        names = sorted(
            each.name
            for each in folder.iterdir()
            if each.suffix in known and not each.name.startswith(".") and each.is_file()
        )
    except OSError:
        return ""
    if not names:
        return ""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    listed = ", ".join(str(folder / name) for name in names[:_MOST])
    return f"; give a {what} of it: {listed}{more}"
