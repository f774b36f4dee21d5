"""A run's progress under the cell of a notebook: the last lines, one of which is replaced."""

from __future__ import annotations

import sys
import time
from collections import deque
from html import escape
from typing import Any

from modicum.cli.live import Lines
from modicum.cli.live_words import EventRecord, phase

LINES = 8
_PAUSE = 0.25  # seconds between two pictures: a browser shows no more


def notebook_display() -> Any:
    """IPython's module `display` where a notebook shows what is displayed; None elsewhere.

    IPython is not imported for this: in a notebook it is there.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):  # a terminal's IPython has none
        return None
    import importlib

    return importlib.import_module("IPython.display")


class NotebookProgress(Lines):
    """Shows events in one output of a cell.

    Args:
        display: a module like `IPython.display`.
    """

    def __init__(self, display: Any) -> None:
        super().__init__(sys.stdout)
        self._html = display.HTML
        self._said: deque[str] = deque(maxlen=LINES)
        self._line, self._shown = "", 0.0
        self._output = display.display(self._html(""), display_id=True)

    def say(self, text: str) -> None:
        """A line that stays for a while."""
        self._said.append(text)
        self._show()

    def on_plan(self, event: EventRecord) -> None:
        """The plan shows itself where a cell ends with it."""
        self.gauge.plan(event)

    def on_phase(self, event: EventRecord) -> None:
        """The line."""
        self._line = "  ".join(filter(None, phase(event)))
        self._show(seldom=bool(event.get("done")))

    def on_step(self, event: EventRecord) -> None:
        """The line."""
        self.gauge.step(event)
        self._line = "  ".join(self.gauge.words())
        self._show(seldom=event.get("step") != event.get("steps"))

    def on_finished(self, event: EventRecord) -> None:
        """How it ended is said in place of the line."""
        self._line = ""
        super().on_finished(event)

    def close(self) -> None:
        """Show what came last."""
        self._show()

    def _show(self, *, seldom: bool = False) -> None:
        now = time.monotonic()
        if seldom and now - self._shown < _PAUSE:
            return
        self._shown = now
        text = escape("\n".join([*self._said, self._line]).strip())
        share = "" if self.gauge.share is None else f'<progress value="{self.gauge.share:.3f}">'
        bar = f"{share}</progress>" if share else ""
        self._output.update(self._html(f"<pre>{text}</pre>{bar}"))
