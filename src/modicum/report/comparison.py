"""The page of a folder that `modicum compare` has written, by a protocol or without one."""

from __future__ import annotations

from pathlib import Path

from modicum.report import compared, protocol


def is_comparison(folder: str | Path) -> bool:
    """Whether a folder holds a comparison that has ended."""
    return any((Path(folder) / name).is_file() for name in (compared.RESULT, protocol.RESULT))


def write_comparison(folder: str | Path) -> Path:
    """Write the page of a comparison's folder, atomically, and return its path.

    Raises:
        InputError: there is no comparison that has ended, the disk is full, or what writes the page
            is not installed.

    >>> from modicum import report
    >>> report.write_comparison("compare/adapters")                          # doctest: +SKIP
    PosixPath('compare/adapters/compare.html')
    """
    if (Path(folder) / protocol.RESULT).is_file():
        return protocol.write_protocol(folder)
    return compared.write_compared(folder)
