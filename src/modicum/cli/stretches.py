"""A process of a stretch of a run: alone or one of its ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from modicum.cli.live_events import EventListener
from modicum.cli.live_words import EventRecord
from modicum.core.errors import ModicumError


class StepLines(EventListener):
    """On a terminal, the step that is done; warnings everywhere."""

    def on_step(self, event: EventRecord) -> None:
        """Name it."""
        if sys.stderr.isatty():
            self.say(f"  step {event['step']}: loss {event['loss']:.4f}")

    def on_warning(self, event: EventRecord) -> None:
        """Say it."""
        self.say(f"warning: {event.get('message', '')}")


def do_stretch(file: Path) -> None:
    """Do what a file says; why it could not be done is left for who has started this.

    Raises:
        typer.Exit: with the exit code of what went wrong.
    """
    from modicum.core.machine import pick_device
    from modicum.core.ranks.ranks import PeerLost, joined
    from modicum.trainer.folder import RunFolder
    from modicum.verify.processes import note_failure
    from modicum.verify.stretch import Stretch, run_stretch

    stretch = Stretch.load(file)
    try:
        device = RunFolder(stretch.folder).read_recipe().training.device
        with joined(pick_device(device).type) as ranks, StepLines(sys.stderr) as tell:
            run_stretch(stretch, ranks, tell if ranks.first else lambda event: None)
    except PeerLost:
        raise
    except ModicumError as error:
        note_failure(stretch.failure, error)
        raise typer.Exit(error.exit_code) from None
