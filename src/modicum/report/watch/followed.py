"""Run folders that are read as they grow: of the metrics only what came since the last time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from modicum.report.charts import payload
from modicum.report.columns import StepColumns
from modicum.report.folder import FILES, FolderContents, checked, read
from modicum.report.lines import GrowingFile
from modicum.report.overlay import names
from modicum.report.page import harmless_json, render

_SHARE = 5  # curves that took a second to make are made again after this many
_KEPT = 20  # answers, of as many stretches of the run


class _FollowedFile:
    """The columns of one file, up to its last complete line."""

    def __init__(self, path: Path) -> None:
        self.columns = StepColumns()
        self._file, self._begun = GrowingFile(path), 0

    def look(self) -> tuple[int, int]:
        """Read on; how often the file was begun, and how many rows there are."""
        for rows in self._file.more():
            if self._file.begun != self._begun:
                self._begun, self.columns = self._file.begun, StepColumns()
            self.columns.extend(rows)
        return self._begun, len(self.columns)


class _FollowedRun:
    """One run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics = _FollowedFile(folder / "metrics.jsonl")
        self._evaluations = _FollowedFile(folder / "evaluations.jsonl")

    def look(self) -> tuple[str, str]:
        """What has changed since: of all files, and of those that are no curves."""
        of_rows = f"{self._metrics.look()}{self._evaluations.look()}"
        others = [_state(self.folder / name) for name in FILES if name != "metrics.jsonl"]
        return of_rows + str(others), str(others)

    def contents(self) -> FolderContents:
        """The folder as it is."""
        return read(self.folder, self._metrics.columns, self._evaluations.columns)


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


class FollowedRuns:
    """What the server answers about runs that may be training.

    Args:
        folders: of the runs; nothing in them is written.

    Raises:
        InputError: there is no such run folder.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._runs = [_FollowedRun(checked(folder)) for folder in folders]
        self._lock = threading.Lock()
        self._made: dict[str, tuple[float, str, str]] = {}

    def page(self) -> str:
        """The page as the runs are now."""

        def make(version: str, parts: str) -> str:
            return render(self._contents(), {"version": version, "parts": parts})

        return self._answer("page", make)[1]

    def curves(self, low: float = -math.inf, high: float = math.inf) -> tuple[str, str]:
        """The version of the files, and as JSON what is drawn of them from one step to another."""

        def make(version: str, parts: str) -> str:
            contents = self._contents()
            drawn = payload(contents, low, high)
            for run, name in zip(drawn["runs"], names(contents), strict=True):
                run["name"] = name
            return harmless_json(drawn | {"version": version, "parts": parts})

        return self._answer(f"curves {low} {high}", make, share=_SHARE)

    def version(self) -> str:
        """Which changes with every file that does."""
        with self._lock:
            return self._look()[0]

    def _contents(self) -> list[FolderContents]:
        return [run.contents() for run in self._runs]

    def _look(self) -> tuple[str, str]:
        states = [run.look() for run in self._runs]
        return "".join(both for both, _ in states), "".join(others for _, others in states)

    def _answer(
        self, name: str, make: Callable[[str, str], str], share: int = 0
    ) -> tuple[str, str]:
        """The last answer of that name while it is right or fresh, else a new one.

        Args:
            share: an answer is fresh for so many times the time that it took to make.
        """
        with self._lock:
            until, version, answer = self._made.get(name, (0.0, "", ""))
            begun = time.monotonic()
            if answer and begun < until:
                return version, answer
            now, parts = self._look()
            if answer and now == version:
                return version, answer
            answer = make(now, parts)
            if len(self._made) > _KEPT:
                self._made.clear()
            end = time.monotonic()
            self._made[name] = (end + share * (end - begun), now, answer)
            return now, answer
