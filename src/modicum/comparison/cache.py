"""Trials that studies share: what was trained by the same recipe is trained once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from modicum.comparison.outcome import Outcome, Settings, Trial, TrialPart, trial_name
from modicum.core.errors import InputError
from modicum.core.known_outcomes import known_outcome, sources_digest

FOLDER = "trials"  # in the user's cache
_KEPT = ("finished", "diverged")


class _NotKeptError(Exception):
    """Carries the outcome of a trial that may end otherwise next time."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.status)
        self.outcome = outcome


class SharedTrials:
    """A trial whose losses and bytes are kept in the user's cache, for all studies.

    Known by what `recipe` gives, by sources, versions and machine. Seconds are never kept, and
    neither is a crash. An outcome from there is marked as `taken`.

    Args:
        trial: trains what is not known.
        recipe: all that decides an outcome, such as the resolved recipe and the seed; None: that is
            not known, so the trial is trained in any case. A side's name is not part of it unless
            it is put in, so that AdamW is AdamW in every study.
        metrics: the names of those that are kept, no times among them; None: all.
        sources: a digest of the code that decides numbers; None: of all of modicum.
        fresh: train also what is known.

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
        recipe: Callable[[str, Settings, int, TrialPart], Mapping[str, Any] | None],
        *,
        metrics: Collection[str] | None = (),
        sources: str | None = None,
        fresh: bool = False,
    ) -> None:
        self.trial, self.recipe, self.metrics = trial, recipe, metrics
        self.sources, self.fresh = sources, fresh

    def __call__(self, side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        """The outcome of the trial, with the seconds that it took now; None where it was known."""
        recipe = self.recipe(side, settings, seed, part)
        if recipe is None:
            return self.trial(side, settings, seed, part)
        trained: list[Outcome] = []

        def train() -> dict[str, Any]:
            outcome = self.trial(side, settings, seed, part)
            trained.append(outcome)
            if outcome.status not in _KEPT:
                raise _NotKeptError(outcome)
            return self.kept(outcome)

        def asked(fresh: bool) -> tuple[dict[str, Any], bool]:
            sources = self.sources or sources_digest()
            return known_outcome(dict, recipe, train, folder=FOLDER, sources=sources, fresh=fresh)

        try:
            values, known = asked(self.fresh or self.begun(side, settings, seed, part))
            if known:
                with suppress(InputError):  # a damaged entry is as none
                    return self.taken(values, trial_name(side, settings, seed, part))
                asked(fresh=True)
        except _NotKeptError as error:
            return error.outcome
        return trained[0]

    def begun(self, side: str, settings: Settings, seed: int, part: TrialPart) -> bool:
        """Whether the trial has begun in this study, so that it ends here as well."""
        return False

    def kept(self, outcome: Outcome) -> dict[str, Any]:
        """What is kept of an outcome, as JSON values."""
        names = outcome.metrics if self.metrics is None else self.metrics
        metrics = {name: value for name, value in outcome.metrics.items() if name in names}
        return replace(outcome, seconds=None, folder="", metrics=metrics).to_json()

    def taken(self, values: Mapping[str, Any], name: str) -> Outcome:
        """The outcome that was kept.

        Args:
            name: of the trial in this study.

        Raises:
            InputError: it is none.
        """
        return replace(Outcome.from_json(values), taken=True)

    def stop(self) -> None:
        """End what the trial has running."""
        stop = getattr(self.trial, "stop", None)
        if stop is not None:
            stop()
