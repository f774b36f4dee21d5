"""Some steps of a run, done in a folder of their own: a copy of the run's, and never the run's.

The trainer's own loop does them. It is stopped as a signal stops it, so what is looked at is what
happens to a user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError, Interrupted
from modicum.core.files import read_json, write_json
from modicum.core.progress import Listener
from modicum.core.ranks.ranks import Ranks
from modicum.trainer.best import take_best
from modicum.trainer.exporting import export
from modicum.trainer.folder import RunFolder
from modicum.trainer.loop import run
from modicum.trainer.record import RunRecord
from modicum.trainer.resume import continued
from modicum.trainer.session import Session
from modicum.trainer.setup import begin
from modicum.trainer.stop import StopRequested, StopSignals
from modicum.verify.traces import Looks, StepTrace

# What a stretch that failed leaves for the process that started it.
FAILED = ".failed.json"


@dataclass(frozen=True)
class Stretch:
    """What to do: from the newest checkpoint in a folder, or its beginning, up to a step.

    Args:
        folder: a run folder.
        until: the last step that is done; then the state is saved.
        traces: a folder for what is seen; None: nothing is looked at but the losses.
        states: the steps after which all state is copied to `traces`.
        ranks: processes that do it.
        finish: whether the run comes to its end there, and probe.
    """

    folder: Path
    until: int
    traces: Path | None = None
    states: tuple[int, ...] = ()
    ranks: int = 1
    finish: bool = False

    @property
    def failure(self) -> Path:
        """Where it says why it failed."""
        return self.folder / FAILED

    def save(self, file: Path) -> None:
        """Write it down for the processes that do it."""
        write_json(file, {k: v if k != "states" else list(v) for k, v in self._plain().items()})

    def _plain(self) -> Mapping[str, Any]:
        paths = {"folder": str(self.folder), "traces": self.traces and str(self.traces)}
        return asdict(self) | paths

    @classmethod
    def load(cls, file: Path) -> Stretch:
        """What `save` has written.

        Raises:
            InputError: it is something else.
        """
        try:
            told = read_json(file)
            traces = told["traces"] and Path(told["traces"])
            plain = {"traces": traces, "states": tuple(told["states"])}
            return cls(**told | plain | {"folder": Path(told["folder"])})
        except (KeyError, TypeError, json.JSONDecodeError):
            raise InputError("is no stretch of a run", file=file) from None


def run_stretch(stretch: Stretch, ranks: Ranks, listener: Listener = lambda event: None) -> None:
    """Do a stretch; every rank calls this.

    Raises:
        InputError: something of the run is wrong here, or has changed.
        Interrupted: a signal came.
    """
    recipe = RunFolder(stretch.folder).read_recipe()
    folder = RunFolder.of(stretch.folder, ranks)
    plan = continued(recipe, stretch.folder, ranks=ranks)
    with StopSignals() as signals, folder.locked():
        record = RunRecord.open(folder, plan, clock=ranks.clock)
        with record.running():
            session = begin(plan, folder, listener, signals, record, ranks)
            watch = _Watch(stretch, session, listener)
            session.listener = watch
            try:
                run(session)
            except StopRequested:
                if session.step < stretch.until:
                    raise Interrupted("interrupted; nothing of the run was changed") from None
            watch.end()
            if stretch.finish:
                take_best(session)
                record.finish(export(session), ranks)
            else:
                record.interrupted()


class _Watch:
    """Hears a session's events: asks it to stop after the last step, and looks where asked."""

    def __init__(self, stretch: Stretch, session: Session, listener: Listener) -> None:
        self._stretch, self._session, self._listener = stretch, session, listener
        self._looks = None
        if stretch.traces is not None:
            trace = StepTrace(stretch.traces, session.ranks.rank)
            self._looks = Looks(session, trace, stretch.states)
            self._looks.attach()

    def __call__(self, event: dict[str, Any]) -> None:
        """Take an event."""
        if event["event"] == "step":
            if self._looks is not None:
                self._looks.done(event)
            last = self._stretch.finish or event["step"] == self._session.plan.steps
            if event["step"] >= self._stretch.until and not last:
                self._session.signals.requested = "the end of the stretch"
        elif event["event"] == "surgery" and self._looks is not None:
            self._looks.attach()  # all hooks are new
        self._listener(event)

    def end(self) -> None:
        """Look at what is there after the last step."""
        if self._looks is not None:
            self._looks.ended()
