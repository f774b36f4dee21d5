"""Files with one JSON object a line, while they grow, and when a line of them is damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.core.files import JsonObject, regular

_CHUNK = 4_000_000  # bytes that are parsed at once


@dataclass
class GrowingFile:
    """Rows of a file since they were last asked for.

    A file that became shorter or another one (a run that resumes writes it anew) is read from its
    start, and `begun` says how often that was.

    Args:
        path: the file; while there is none it has no rows.
    """

    path: Path
    begun: int = 0
    damaged: int = 0
    _offset: int = 0
    _inode: int = -1

    def more(self, *, unended: bool = False) -> Iterator[list[JsonObject]]:
        """The rows that came, in lists of some thousands.

        Args:
            unended: the last line counts though no line feed ends it; it will not grow.
        """
        try:
            state = regular(self.path).stat()
        except OSError:
            return
        if state.st_ino != self._inode or state.st_size < self._offset:
            self._inode, self._offset, self.damaged = state.st_ino, 0, 0
            self.begun += 1
        if state.st_size == self._offset:
            return
        try:
            with open(self.path, "rb") as handle:
                handle.seek(self._offset)
                while lines := handle.readlines(_CHUNK):
                    if not lines[-1].endswith(b"\n") and not unended:
                        lines.pop()
                    self._offset += sum(map(len, lines))
                    rows, bad = objects(lines)
                    self.damaged += bad
                    if not rows and not bad:
                        return
                    yield rows
        except OSError:
            return


def objects(lines: list[bytes]) -> tuple[list[JsonObject], int]:
    """The JSON objects of lines, and how many lines hold something else; blank ones do not count.

    >>> objects([b'{"step": 1}', b"", b'{"step": '])
    ([{'step': 1}], 1)
    """
    texts = [text for line in lines if (text := line.decode("utf-8", "replace").strip())]
    values = _parsed("[" + ",".join(texts) + "]")  # at once, which is twice as fast
    if not isinstance(values, list) or len(values) != len(texts):
        values = [_parsed(text) for text in texts]
    rows = [value for value in values if isinstance(value, dict)]
    return rows, len(values) - len(rows)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
