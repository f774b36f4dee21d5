"""The searches in Optuna's own journal, for the dashboards that people have for it.

It is written and never read back into a study: what is there is made anew where it does not hold
what the trials' records hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modicum.comparison.optuna_values import PURPOSE, frozen_trial, silent
from modicum.comparison.tuning import SideTuning, Tried
from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.core.files import disk_errors

JOURNAL = "journal.log"


class SearchJournal:
    """`journal.log` in a study's folder: a study of Optuna's for each side.

    `optuna.storages.JournalStorage(JournalFileBackend("journal.log"))` reads it. Nothing is written
    where Optuna is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / JOURNAL
        self._storage: Any = None
        self._studies: dict[str, Any] = {}
        self._held: dict[str, list[dict[str, Any]]] = {}

    def update(self, tunings: Sequence[SideTuning]) -> None:
        """Add the trials that are not in it; where others are in it, it is begun anew.

        Raises:
            InputError: the disk is full, or cannot be written.
        """
        try:
            optuna = library("optuna", "tuning", PURPOSE)
        except InputError:
            return
        with disk_errors(self.file), silent(optuna):
            try:
                self._append(optuna, tunings)
            except OSError:
                raise
            except Exception:  # whatever a damaged file makes Optuna raise
                self._remove()
                self._append(optuna, tunings)

    def _append(self, optuna: Any, tunings: Sequence[SideTuning]) -> None:
        if self._storage is None:
            self._open(optuna)
        for tuning in tunings:
            name = tuning.side.name
            held, ours = self._held.get(name, []), [_attributes(one) for one in tuning.tried]
            shared = min(len(held), len(ours))
            if held[:shared] != ours[:shared]:
                raise ValueError("the journal holds other trials")
            if name not in self._studies:
                self._studies[name] = optuna.create_study(storage=self._storage, study_name=name)
            for tried in tuning.tried[len(held) :]:
                self._studies[name].add_trial(
                    frozen_trial(
                        tuning.side, tried.settings, tried.outcome.score, _attributes(tried)
                    )
                )
            self._held[name] = max(held, ours, key=len)

    def _open(self, optuna: Any) -> None:
        """Look at what the file holds."""
        journal = optuna.storages.journal
        for left in self.file.parent.glob(f"{self.file.name}.lock*"):
            left.unlink()  # of a process that was killed: the study's folder is ours
        storage = journal.JournalStorage(journal.JournalFileBackend(str(self.file)))
        for name in optuna.get_all_study_names(storage):
            study = optuna.load_study(study_name=name, storage=storage)
            self._studies[name] = study
            self._held[name] = [trial.user_attrs for trial in study.trials]
        self._storage = storage

    def _remove(self) -> None:
        self._storage = None
        self._studies.clear()
        self._held.clear()
        self.file.unlink(missing_ok=True)


def _attributes(tried: Tried) -> dict[str, Any]:
    """What tells a trial of the journal from another."""
    outcome = tried.outcome
    return {"settings": dict(tried.settings), "status": outcome.status, "loss": outcome.loss}
