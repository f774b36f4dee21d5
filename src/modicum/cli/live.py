"""What a run tells while it runs: a live line on a terminal, plain lines or JSON elsewhere.

The trainer calls a listener with one dict an event. A listener never stops a run: a stream that
is closed, or whose reader has gone, makes it fall silent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Literal, TextIO

from modicum.cli import live_words as words
from modicum.cli.live_events import SETUP, EventListener
from modicum.cli.live_words import EventRecord, Gauge
from modicum.cli.plain_tables import plain
from modicum.cli.tables import plan_tables, plan_title
from modicum.core.plain_values import finite
from modicum.report.time_rows import in_words

_LONGEST = 100  # characters of a phase's line
Mode = Literal["auto", "live", "lines", "json", "quiet"]


def listener(mode: Mode = "auto", stream: TextIO | None = None) -> EventListener:
    """The listener of a mode, to call with events and to close; a context manager.

    Args:
        mode: "live" rewrites one line on a terminal; "lines" writes a line now and then, without
            control codes; "json" writes every event as a line of JSON; "quiet" warnings only;
            "auto" is "live" on a terminal that can, else "lines".
        stream: where to; by default standard error, for "json" standard output.

    Raises:
        ValueError: no such mode.
    """
    stream = stream or (sys.stdout if mode == "json" else sys.stderr)
    if mode == "auto":
        mode = "live" if can_rewrite(stream) else "lines"
    if mode == "live":
        from modicum.cli.live_line import LiveLine  # needs rich

        return LiveLine(stream)
    kinds: dict[str, type[EventListener]] = {"lines": Lines, "json": JsonLines, "quiet": Quiet}
    if mode not in kinds:
        raise ValueError(f"no such mode: {mode!r}; one of auto, live, {', '.join(kinds)}")
    return kinds[mode](stream)


def can_rewrite(stream: TextIO) -> bool:
    """Whether a line on `stream` can be rewritten in place and somebody watches it."""
    try:
        terminal = stream.isatty()
    except ValueError:  # closed
        return False
    dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
    watched = os.environ.get("CI", "").lower() in ("", "0", "false")
    letters = (getattr(stream, "encoding", None) or "").lower().startswith("utf")
    return terminal and watched and letters and not dumb


class Quiet(EventListener):
    """Warnings only."""

    def on_warning(self, event: EventRecord) -> None:
        """Say it."""
        self.say(f"warning: {event.get('message', '')}")


class JsonLines(EventListener):
    """Every event, one line of strict JSON each."""

    def __call__(self, event: EventRecord) -> None:
        """Write the event."""
        if self._stream is None:
            return
        try:
            try:
                line = json.dumps(event, allow_nan=False, default=str)
            except ValueError:
                line = json.dumps(finite(dict(event)), default=str)
            self.say(line)
        except (OSError, ValueError):
            self._fall_silent()


class Lines(Quiet):
    """Plain lines for logs: a step's line every few seconds, or every tenth of the run."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.started = self.said = time.monotonic()
        self.tenth = 0
        self.phase: str | None = None
        self.gauge = Gauge()

    def on_phase(self, event: EventRecord) -> None:
        """A line when the preparation comes to a phase, and every five seconds in any phase."""
        now, name = time.monotonic(), event.get("name")
        if (name == self.phase or name not in SETUP) and now - self.said < 5:
            return
        self.phase, self.said = str(name), now
        line = "  ".join(filter(None, words.phase(event)))
        self.say(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}...")

    def on_pace(self, event: EventRecord) -> None:
        """One line."""
        self.say(words.pace(event))

    def on_plan(self, event: EventRecord) -> None:
        """The plan as aligned text."""
        self.gauge.plan(event)
        choices, costs = plan_tables(event)
        self.say(plan_title(event))
        for headers, rows in ((("choice", "value", "why"), choices), (("cost", "", ""), costs)):
            if rows:
                cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
                self.say(plain(headers, cells, [False] * 3).rstrip())

    def on_resumed(self, event: EventRecord) -> None:
        """One line."""
        self.say(f"resumed after step {event.get('step')}")

    def on_step(self, event: EventRecord) -> None:
        """A line if it is time, which is less often the longer the run."""
        self.gauge.step(event)
        now, step, total = time.monotonic(), event["step"], event.get("steps") or 0
        tenth = 10 * step // total if total else 0
        # A log of hours should not have thousands of lines.
        pause = min(max(5.0, (now - self.started) / 40), 60.0)
        if tenth == self.tenth and step != total and now - self.said < pause:
            return
        self.tenth, self.said, self.phase = tenth, now, None
        self.say("  ".join(self.gauge.words()))

    def on_evaluation(self, event: EventRecord) -> None:
        """One line."""
        self.phase = None
        self.say(words.evaluation(event))

    on_test = on_evaluation

    def on_sample(self, event: EventRecord) -> None:
        """One line with the sample's beginning."""
        self.say(words.sample(event))

    def on_checkpoint(self, event: EventRecord) -> None:
        """One line, if that was not just said."""
        if self.gauge.seldom():
            self.say(words.checkpoint(event))

    def on_compile(self, event: EventRecord) -> None:
        """What came of compiling."""
        self.say(words.message(event))

    def on_memory(self, event: EventRecord) -> None:
        """What was done for lack of memory."""
        self.say(words.message(event))

    def on_surgery(self, event: EventRecord) -> None:
        """Shapes changed."""
        self.say(words.message(event))

    def on_ended(self, event: EventRecord) -> None:
        """A method spends nothing from here on."""
        self.say(words.message(event))

    def on_export(self, event: EventRecord) -> None:
        """What the files that were written are."""
        self.say(words.message(event))

    def on_stopping(self, event: EventRecord) -> None:
        """The run stops early."""
        self.say(words.message(event))

    def on_finished(self, event: EventRecord) -> None:
        """How it ended, and where its time went."""
        self.say(words.finished(event))
        if (spent := in_words(event)) is not None:
            self.say(spent)
