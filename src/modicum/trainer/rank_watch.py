"""A run whose ranks are watched: its record says who was the cause, and its listener hears it.

What is found stands in `anomalies.jsonl`, a line each, which the process that watches writes: it is
there when no rank is. Rank 0 reads it after each update, for its record and its listener.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from modicum.comm.watchdog import RankWatchdog
from modicum.comm.watching import COMING_SECONDS, Watch
from modicum.core.errors import ModicumError
from modicum.core.ranks.rank_guard import guarded
from modicum.core.ranks.ranks import PeerLost, Ranks
from modicum.core.ranks.roll_call import SILENT_SECONDS
from modicum.planner import Plan
from modicum.recipe import Recipe
from modicum.trainer.folder import ANOMALIES, RUN
from modicum.trainer.rank_agreement import same_setup
from modicum.trainer.stop import StopRequested

# A supervisor gives ranks that lost another one three seconds.
CAUSE_SECONDS = 2.0


class _Started:
    """The watch that has begun before its run."""

    watch: Watch | None = None


@contextmanager
def watched_start(recipe: Recipe, folder: Path, ranks: Ranks) -> Iterator[Watch]:
    """Watch the ranks in the block, as a recipe says, while they plan a run and in that run.

    Ranks call this when they have just met. Until the watch has begun, they wait for each other
    for seconds alone.

    Raises:
        InputError: ranks have other recipes, code or versions.
        PeerLost: as `watched_run`; or a rank does not come.
    """
    with ExitStack() as stack:
        with nullcontext() if ranks.alone else guarded(ranks.name, SILENT_SECONDS):
            # Or one waits for a watch that another does not want.
            same_setup(recipe, ranks, just_met=True)
            watched = stack.enter_context(
                _watched(recipe, folder, ranks, coming_seconds=SILENT_SECONDS)
            )
        stack.callback(setattr, _Started, "watch", None)
        _Started.watch = watched
        yield watched


@contextmanager
def watched_run(plan: Plan, folder: Path, ranks: Ranks) -> Iterator[Watch]:
    """Watch the ranks of a run in the block, as its recipe says, if they are not watched already.

    Raises:
        PeerLost: another rank is gone; with the sentence who, where that is known.
    """
    if _Started.watch is not None:
        with _told(_Started.watch):
            yield _Started.watch
        return
    with _watched(plan.recipe, folder, ranks) as watched:
        yield watched


@contextmanager
def _watched(
    recipe: Recipe, folder: Path, ranks: Ranks, *, coming_seconds: float = COMING_SECONDS
) -> Iterator[Watch]:
    method = recipe.method("watchdog")
    if method is None or ranks.alone:
        yield Watch(None)
        return
    assert isinstance(method, RankWatchdog)
    files = {"record": folder / ANOMALIES, "run": folder / RUN} if ranks.first else {}
    watched = method.watch(coming_seconds=coming_seconds, **files)
    try:
        with _told(watched):
            yield watched
    finally:
        watched.close()


@contextmanager
def _told(watched: Watch) -> Iterator[None]:
    """Have the loss of a rank say who it was, and tell the others of an error in the block."""
    try:
        yield
    except PeerLost as error:
        known = isinstance(error.__cause__, PeerLost)
        if known or (said := watched.cause(CAUSE_SECONDS)) is None:
            raise
        raise PeerLost(f"{said}; the same command resumes from the last checkpoint") from error
    except (ModicumError, StopRequested):
        raise  # it is said on all ranks, or the others lose this one
    except Exception as error:
        watched.fail(error)
        raise


class AnomalyReader:
    """What is found in a run from here on.

    Args:
        folder: the run's; None where this process does not read it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / ANOMALIES
        self._read = self._size()

    def new(self) -> list[dict[str, Any]]:
        """What has come since this was last asked."""
        if self._path is None or (size := self._size()) <= self._read:
            return []
        with open(self._path, "rb") as file:
            file.seek(self._read)
            lines = file.read(size - self._read).rpartition(b"\n")[0]
        self._read += len(lines) + 1 if lines else 0
        found = []
        for line in lines.splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return [row for row in found if isinstance(row, dict)]

    def _size(self) -> int:
        try:
            return 0 if self._path is None else self._path.stat().st_size
        except OSError:
            return 0
