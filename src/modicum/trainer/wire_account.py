"""What rank 0 sends in a run, call by call: the file `wire.jsonl` of the run folder."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType

from modicum.core.clock import TRACKING
from modicum.core.errors import InputError
from modicum.core.ranks.call_timeline import CallTimeline
from modicum.core.ranks.observed_groups import begin_observing, end_observing
from modicum.core.ranks.ranks import Ranks
from modicum.trainer.folder import WIRE, RunFolder

_SECONDS = 2.0  # between writes


class WireAccount(AbstractContextManager[None]):
    """Rank 0's calls, while updates are made; one process alone, and the other ranks, keep none.

    As a context it observes the calls of the block and writes what is left at its end.
    """

    def __init__(self, folder: RunFolder, ranks: Ranks) -> None:
        self._folder, self._ranks = folder, ranks
        self._timeline: CallTimeline | None = None
        self._wrote = 0.0

    def __enter__(self) -> None:
        if self._ranks.first and not self._ranks.alone:
            self._timeline = CallTimeline(self._folder.rows(WIRE))
            begin_observing(self._timeline)

    def update(self, step: int) -> AbstractContextManager[None]:
        """The block makes update number `step`."""
        return nullcontext() if self._timeline is None else self._timeline.update(step)

    def write(self) -> None:
        """Write down the updates that are known, at most every other second."""
        if self._timeline is not None and time.monotonic() - self._wrote > _SECONDS:
            self._write(self._timeline)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        timeline, self._timeline = self._timeline, None
        if timeline is None:
            return
        end_observing(timeline)
        timeline.finish()
        # What a run fails by says more than that this could not be written.
        with suppress(InputError) if error is not None else nullcontext():
            self._write(timeline)

    def _write(self, timeline: CallTimeline) -> None:
        with self._ranks.clock(TRACKING):
            rows, dropped = timeline.written()
            if dropped:
                self._folder.replace_rows(WIRE, rows)
            elif rows:
                self._folder.append(WIRE, *rows)
            self._wrote = time.monotonic()
