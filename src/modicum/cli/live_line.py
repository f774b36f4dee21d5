"""One live line at the foot of a terminal, with what matters printed above it. Needs rich."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from modicum.cli import live_words as words
from modicum.cli.live_events import SETUP, EventListener
from modicum.cli.live_words import EventRecord, Gauge
from modicum.cli.rich_tables import rich_table
from modicum.cli.tables import plan_tables, plan_title
from modicum.report.numbers import number, quantity
from modicum.report.time_rows import in_words

_REFRESH = 1 / 8  # seconds between two drawings of the line, at least


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the listener; rich's own way is to end the process."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads any more")


class LiveLine(EventListener):
    """Rewrites one line at most eight times a second, and only when an event comes.

    No thread draws: training may own every core, and between events nothing is new.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.console = _Console(file=stream, force_terminal=True, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.gauge = Gauge()
        self.phase: tuple[str, float] | None = None
        self.drawn = 0.0
        self._guarded(self.live.start)

    def __call__(self, event: EventRecord) -> None:
        """Take one event; whatever follows a phase of the preparation, the phase is over."""
        if self.phase is not None and event.get("event") != "phase":
            self._guarded(self._phase_over)
        super().__call__(event)

    def close(self) -> None:
        """Take the line away and give the cursor back."""
        if self.phase is not None:
            self._guarded(self._phase_over)
        with suppress(OSError, ValueError):
            self.live.stop()

    def on_phase(self, event: EventRecord) -> None:
        """Show how far the phase is; a phase of the preparation leaves a line behind."""
        name, done, total = str(event.get("name")), event.get("done"), event.get("total")
        begun = self.phase is None or self.phase[0] != name
        if begun:
            if self.phase is not None:
                self._phase_over()
            self.phase = (name, time.monotonic())
        if not begun and time.monotonic() - self.drawn < _REFRESH:
            return
        share = done / total if done and total else None
        self.drawn = time.monotonic()
        self.live.update(
            self._line(list(zip(words.phase(event), ("bold", ""), strict=True)), share),
            refresh=True,
        )

    def on_pace(self, event: EventRecord) -> None:
        """Say it above the line."""
        self.console.print(Text(words.pace(event), "dim"))

    def on_plan(self, event: EventRecord) -> None:
        """The plan as a small table: what, why, cost."""
        self.gauge.plan(event)
        choices, costs = plan_tables(event)
        rows = [
            *(["" if cell is None else str(cell) for cell in row] for row in choices),
            *([str(cell) for cell in row] for row in costs),
        ]
        table = rich_table(("", "", ""), rows, [False] * 3, plan_title(event))
        table.show_header = False
        if choices and costs:
            table.rows[len(choices) - 1].end_section = True
        self.console.print(table)

    def on_resumed(self, event: EventRecord) -> None:
        """Say it above the line."""
        self.console.print(Text(f"resumed after step {event.get('step')}"))

    def on_step(self, event: EventRecord) -> None:
        """Draw the line, if the last drawing is old enough."""
        self.gauge.step(event)
        now = time.monotonic()
        if now - self.drawn >= _REFRESH or event["step"] == event.get("steps"):
            self.drawn = now
            self.live.update(self._step_line(), refresh=True)

    def on_evaluation(self, event: EventRecord) -> None:
        """Say it above the line."""
        self.console.print(Text(words.evaluation(event)))

    on_test = on_evaluation

    def on_sample(self, event: EventRecord) -> None:
        """Its beginning, above the line."""
        self.console.print(Text(words.sample(event, max(20, self.console.width - 24)), "dim"))

    def on_checkpoint(self, event: EventRecord) -> None:
        """Say it above the line, if that was not just said."""
        if self.gauge.seldom():
            self.console.print(Text(words.checkpoint(event), "dim"))

    def on_compile(self, event: EventRecord) -> None:
        """Say it above the line."""
        self.console.print(Text(words.message(event), "dim"))

    def on_memory(self, event: EventRecord) -> None:
        """Say it above the line."""
        self.console.print(Text(words.message(event), "yellow"))

    def on_export(self, event: EventRecord) -> None:
        """Say it above the line."""
        self.console.print(Text(words.message(event), "dim"))

    def on_stopping(self, event: EventRecord) -> None:
        """Say it above the line."""
        self.console.print(Text(words.message(event), "yellow"))

    def on_warning(self, event: EventRecord) -> None:
        """Say it above the line."""
        self.console.print(Text.assemble(("warning: ", "yellow bold"), str(event.get("message"))))

    def on_finished(self, event: EventRecord) -> None:
        """Say how it ended, and where its time went, where the line was."""
        self.live.stop()
        style = {"finished": "green", "failed": "red"}.get(str(event.get("status")), "yellow")
        self.console.print(Text(words.finished(event), style))
        if (spent := in_words(event)) is not None:
            self.console.print(Text(spent, "dim"))

    def _phase_over(self) -> None:
        assert self.phase is not None
        name, since = self.phase
        self.phase = None
        if name in SETUP:
            took = quantity(time.monotonic() - since, "seconds")
            self.console.print(Text.assemble(("✓ ", "green"), name, (f"  {took}", "dim")))
        self.live.update(self._step_line() if self.gauge.last else Text(), refresh=True)

    def _style(self, text: str) -> str:
        """Memory above the budget is red; all else as the terminal has it."""
        size, budget = number(self.gauge.last.get("bytes")), self.gauge.budget
        over = size is not None and budget is not None and size > budget
        return "red bold" if over and " of " in text else ""

    def _step_line(self) -> Text:
        first, *others = self.gauge.words()
        if sum(len(text) + 2 for text in (first, *others)) > self.console.width:
            first, *others = self.gauge.words(narrow=True)
        parts = [(first, "bold"), *((text, self._style(text)) for text in others)]
        return self._line(parts, self.gauge.share)

    def _line(self, parts: list[tuple[str, str]], share: float | None) -> Text:
        """The line: its first part, a bar in what room there is, the other parts."""
        room = self.console.width - sum(len(text) + 2 for text, _ in parts) - 2
        first, *others = [Text(text, style) for text, style in parts if text]
        pieces = [first]
        if share is not None and room >= 8:
            width = min(room, 30)
            full = round(share * width)
            pieces.append(
                Text.assemble(("━" * full, "cyan"), ("━" * (width - full), "bright_black"))
            )
        line = Text("  ").join([*pieces, *others])
        line.no_wrap, line.overflow = True, "ellipsis"
        return line

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._stream is None:
            return
        try:
            action()
        except (OSError, ValueError):
            self._fall_silent()

    def _fall_silent(self) -> None:
        # Stopping gives the process's own stdout and stderr back before it writes its last.
        with suppress(OSError, ValueError):
            self.live.stop()
        super()._fall_silent()
