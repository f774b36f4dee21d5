"""Requests to stop: SIGTERM and Ctrl-C set a flag, which the loop reads where it can save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class StopRequested(Exception):
    """Raised where the loop can be left; the trainer saves and turns it into `Interrupted`.

    Args:
        by: a signal's name, or in words whose it was.

    >>> str(StopRequested("SIGINT")), str(StopRequested("SIGTERM"))
    ('stopped (Ctrl-C)', 'stopped by SIGTERM')
    """

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.by = by

    def __str__(self) -> str:
        return "stopped (Ctrl-C)" if self.by == signal.SIGINT.name else f"stopped by {self.by}"


class StopSignals:
    """While it is entered, SIGTERM and SIGINT set `requested`; a second SIGINT ends at once.

    Outside the main thread no handlers can be set, and signals do what they did before.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        if self._at_once:
            self.check()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Leave in the middle of whatever is done in this block: for long work without state.

        Raises:
            StopRequested: a signal came, now or before.
        """
        self._at_once = True
        try:
            self.check()
            yield
            self.check()  # who swallows errors has swallowed this one too
        finally:
            self._at_once = False

    def check(self) -> None:
        """Leave here if somebody asked.

        Raises:
            StopRequested: a signal came.
        """
        if self.requested:
            raise StopRequested(self.requested)
