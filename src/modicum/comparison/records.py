"""Finished trials on disk, a file each: the truth of which all else is made anew."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.comparison.outcome import Outcome, Settings, Status, TrialPart, trial_name
from modicum.core.errors import InputError
from modicum.core.files import disk_errors, read_json, write_json

TRIALS = "trials"


@dataclass(frozen=True)
class Job:
    """A trial to be run: all that it is called with."""

    side: str
    settings: Settings
    seed: int
    part: TrialPart

    @property
    def name(self) -> str:
        """By which it is known, in files and in the report."""
        return trial_name(self.side, self.settings, self.seed, self.part)

    def to_json(self) -> dict[str, Any]:
        """What it is called with, and the name that follows from it."""
        found = {"name": self.name, "side": self.side, "settings": dict(self.settings)}
        return found | {"seed": self.seed, "part": self.part}


class TrialRecords:
    """The outcomes in a folder by their trial's name, each written once and never changed.

    Attributes:
        damaged: files that hold no such record; their trials are run again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / TRIALS
        self.damaged: list[Path] = []
        self._outcomes: dict[str, Outcome] = {}

    def read(self, but: Collection[Status] = ()) -> None:
        """Read all records, leaving out those that ended with one of these statuses.

        Raises:
            InputError: the folder cannot be made.
        """
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".*.part"):
                left.unlink()
        for file in sorted(self.folder.glob("*.json")):
            outcome = self._read(file)
            if outcome is None:
                self.damaged.append(file)
            elif outcome.status not in but:
                self._outcomes[file.stem] = outcome

    def _read(self, file: Path) -> Outcome | None:
        try:
            values = read_json(file)
            job = Job(values["side"], values["settings"], values["seed"], values["part"])
            return Outcome.from_json(values["outcome"]) if job.name == file.stem else None
        except (InputError, KeyError, TypeError):
            return None

    def keep(self, job: Job, outcome: Outcome) -> None:
        """Write a trial's outcome.

        Raises:
            InputError: the disk is full, or cannot be written.
        """
        values = job.to_json() | {"outcome": outcome.to_json()}
        write_json(self.folder / f"{job.name}.json", values)
        self._outcomes[job.name] = outcome

    def outcome(self, job: Job) -> Outcome | None:
        """What a trial ended with, where it did."""
        return self._outcomes.get(job.name)

    def __len__(self) -> int:
        return len(self._outcomes)
