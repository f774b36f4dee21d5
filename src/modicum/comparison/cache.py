"""Trials that studies share: what was trained by the same recipe is trained once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from modicum.comparison.outcome import Outcome, Settings, Trial, TrialPart
from modicum.core.errors import InputError
from modicum.core.known_outcomes import known_outcome, sources_digest

_FOLDER = "trials"
_KEPT = ("finished", "diverged")
KNOWN = "known from an earlier study"


class _NotKeptError(Exception):
    """Carries the outcome of a trial that may end otherwise next time."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.status)
        self.outcome = outcome


class SharedTrials:
    """A trial whose losses and bytes are kept in the user's cache, for all studies.

    Known by what `recipe` gives, by sources, versions and machine. Seconds are never kept, and
    neither is a crash.

    Args:
        trial: trains what is not known.
        recipe: all that decides an outcome, such as the resolved recipe and the seed. A side's
            name is not part of it unless it is put in, so that AdamW is AdamW in every study.
        metrics: the names of those that are kept: no times.
        sources: a digest of the code that decides numbers; None: of all of modicum.

    >>> from modicum.comparison.cache import SharedTrials
    >>> shared = SharedTrials(
    ...     lambda side, settings, seed, part: Outcome("finished", loss=1.5),
    ...     lambda side, settings, seed, part: {"formula": 1, "seed": seed, **settings},
    ... )
    >>> shared("adamw", {"rate": 0.1}, 0, "tune").loss                       # doctest: +SKIP
    1.5
    """

    def __init__(
        self,
        trial: Trial,
        recipe: Callable[[str, Settings, int, TrialPart], Mapping[str, Any]],
        *,
        metrics: Collection[str] = (),
        sources: str | None = None,
    ) -> None:
        self.trial, self.recipe, self.metrics, self.sources = trial, recipe, metrics, sources

    def __call__(self, side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        """The outcome of the trial, with the seconds that it took now; None where it was known."""
        trained: list[Outcome] = []

        def train() -> dict[str, Any]:
            outcome = self.trial(side, settings, seed, part)
            trained.append(outcome)
            if outcome.status not in _KEPT:
                raise _NotKeptError(outcome)
            metrics = {n: x for n, x in outcome.metrics.items() if n in self.metrics}
            return replace(outcome, seconds=None, folder="", metrics=metrics).to_json()

        try:
            values, known = known_outcome(
                dict,
                self.recipe(side, settings, seed, part),
                train,
                folder=_FOLDER,
                sources=self.sources or sources_digest(),
            )
        except _NotKeptError as error:
            return error.outcome
        if not known:
            return trained[0]
        with suppress(InputError):  # a damaged entry is as none
            return replace(Outcome.from_json(values), message=KNOWN)
        return self.trial(side, settings, seed, part)

    def stop(self) -> None:
        """End what the trial has running."""
        stop = getattr(self.trial, "stop", None)
        if stop is not None:
            stop()
