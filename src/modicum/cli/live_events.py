"""What hears a run's events: the base of all that show them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from modicum.cli.live_words import EventRecord

# Phases before the first step and after the last.
SETUP = ("reading data", "training tokenizer", "tokenizing", "building", "exporting")


class EventListener:
    """Hears events: `event["event"]` names the method that takes it, others pass unheard."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def __call__(self, event: EventRecord) -> None:
        """Take one event of the trainer's."""
        if self._stream is None:
            return
        take = getattr(self, f"on_{event.get('event')}", None)
        if take is None:
            return
        try:
            take(event)
        except (OSError, ValueError):
            self._fall_silent()
        except (LookupError, TypeError):
            pass  # an event that lacks something is not worth a run

    def close(self) -> None:
        """Leave the stream as it was found; calling it again does nothing."""

    def __enter__(self) -> EventListener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Write one line, in what letters the stream has."""
        stream = self._stream
        if stream is None:
            return
        try:
            stream.write(text + "\n")
        except UnicodeEncodeError as error:
            stream.write(text.encode(error.encoding, "replace").decode(error.encoding) + "\n")
        stream.flush()

    def _fall_silent(self) -> None:
        """Nobody reads any more: write nothing from now on, and let the exit be quiet too."""
        stream, self._stream = self._stream, None
        if stream is sys.stdout:
            # Python flushes standard output when it ends, and would complain of the broken pipe.
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
