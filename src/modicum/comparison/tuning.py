"""Which settings a side tries next: a function of a seed and of the losses so far, nothing else.

Optuna's samplers are asked for batches of a fixed size, each from a study made anew of the trials
before the batch. So neither who finished first, nor where a study was stopped, nor how many trials
it was meant to have changes what is tried.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from modicum.comparison.designs import derived, grids, spread
from modicum.comparison.luck import Selection
from modicum.comparison.optuna_values import PURPOSE, distributions, frozen_trial, silent
from modicum.comparison.outcome import Outcome, Settings
from modicum.comparison.space import Side
from modicum.core.errors import InputError
from modicum.core.extras import library

SearchSampler = Literal["tpe", "random", "grid"]
SAMPLERS: tuple[SearchSampler, ...] = get_args(SearchSampler)
_SPREAD = 8  # settings before the tree-structured Parzen estimator has enough to go by
_ASKED = 25  # times as many as wanted are asked for, where known settings come again


@dataclass(frozen=True)
class Tried:
    """Settings, without the fixed ones, and what came of them."""

    settings: Settings
    outcome: Outcome

    @property
    def told(self) -> float | None:
        """What a sampler is given: settings that do not run are the worst there are.

        A crash says nothing of the settings, so the sampler does not hear of it.
        """
        status = self.outcome.status
        return math.inf if status in ("out_of_memory", "refused") else self.outcome.score


class SideTuning:
    """The search on one side, as a value of what was tried.

    The defaults come first. No settings come twice: a space with few settings is left when all of
    them were tried.

    Args:
        sampler: `tpe` (the tree-structured Parzen estimator, Bergstra et al. 2011, after settings
            that are spread evenly), `random`, or `grid`, whose steps are halved as often as there
            are trials for it.
        seed: all sides have the same, so where their ranges are equal so are the first settings,
            and no side is better by luckier draws.
        batch: how many are asked for at once.

    Raises:
        InputError: Optuna, which the extra `tuning` brings, is not installed (not for `grid`).
    """

    def __init__(self, side: Side, sampler: SearchSampler, seed: int, batch: int) -> None:
        self.side, self.sampler, self.seed, self.batch = side, sampler, seed, batch
        self.tried: list[Tried] = []
        self.repeated: dict[int, list[Outcome]] = {}
        self.notes: list[str] = []
        self._begun = [0]  # the first trial of each round
        self._nudged: dict[str, Any] | None = None
        if sampler != "grid":
            library("optuna", "tuning", PURPOSE)

    def ask(self) -> list[dict[str, Any]]:
        """What is left of the current batch; nothing where all settings were tried.

        The batch follows from the trials before it alone.
        """
        within = (len(self.tried) - self._begun[-1]) % self.batch
        before = len(self.tried) - within
        return self._batch(self.tried[:before])[within:]

    def tell(self, settings: Settings, outcome: Outcome) -> None:
        """What came of the next settings, in the order in which they were asked for."""
        self.tried.append(Tried(settings, outcome))

    @property
    def exhausted(self) -> bool:
        """Whether all settings were tried."""
        return len(self.tried) >= self.side.size

    def leaders(self, count: int) -> list[int]:
        """The numbers of the trials with the least losses, from the least on."""
        scores = [(tried.outcome.loss, number) for number, tried in enumerate(self.tried)]
        finished = sorted((loss, number) for loss, number in scores if loss is not None)
        return [number for _, number in finished[:count]]

    @property
    def best(self) -> int | None:
        """The number of the trial with the least loss, the first of several; None without one."""
        return next(iter(self.leaders(1)), None)

    def score(self, number: int) -> float | None:
        """The mean loss of a trial and its repetitions; None if one of them has none."""
        outcomes = [self.tried[number].outcome, *self.repeated.get(number, [])]
        losses = [outcome.loss for outcome in outcomes if outcome.loss is not None]
        return statistics.fmean(losses) if len(losses) == len(outcomes) else None

    @property
    def chosen(self) -> int | None:
        """The trial whose settings are frozen: of those that were repeated, the least mean.

        The least of many single losses is a lucky one. Where no repetition ended well it is the
        best of the single ones.
        """
        scores = [(self.score(number), number) for number in self.repeated]
        sound = [(score, number) for score, number in scores if score is not None]
        return min(sound)[1] if sound else self.best

    @property
    def selection(self) -> Selection:
        """What `chosen` is chosen from."""
        single = [number for number in self.leaders(len(self.tried)) if number not in self.repeated]
        scores = [self.score(number) for number in [*self.repeated, *single]]
        repetitions = max((len(one) for one in self.repeated.values()), default=0)
        losses = tuple(score for score in scores if score is not None)
        return Selection(losses, len(self.repeated), repetitions)

    def edges(self) -> dict[str, float]:
        """The parameters that are best at an edge of their range which can be widened."""
        best = self.best
        if best is None:
            return {}
        settings = self.tried[best].settings
        edges = self.side.edges(settings, [tried.settings for tried in self.tried])
        wider = self.side.widened(edges)
        return {
            name: end
            for name, end in edges.items()
            if wider.dimensions[name] != self.side.dimensions[name]
        }

    def begin_round(self, edges: Mapping[str, float]) -> None:
        """More trials, with these parameters' ranges widened; one beyond the edge comes first."""
        self._begun.append(len(self.tried))
        self._nudged, best = None, self.best
        if not edges or best is None:
            return
        self.side = self.side.widened(edges)
        self._nudged = dict(self.tried[best].settings)
        for name, end in edges.items():
            dimension = self.side.dimensions[name]
            further = 0.0 if dimension.place(end) < 0.5 else 1.0
            self._nudged[name] = dimension.at((dimension.place(end) + further) / 2)
            self.notes.append(
                f"{name} was best at its edge {end:g}; its range became "
                f"{dimension.low:g} to {dimension.high:g}"
            )

    def _batch(self, before: Sequence[Tried]) -> list[dict[str, Any]]:
        wanted = int(min(self.batch, max(0, self.side.size - len(before))))
        seen, found = {_key(tried.settings) for tried in before}, list[dict[str, Any]]()
        for settings in self._candidates(before, wanted):
            if len(found) == wanted:
                break
            if _key(settings) not in seen:
                seen.add(_key(settings))
                found.append(settings)
        return found

    def _candidates(self, before: Sequence[Tried], wanted: int) -> Iterator[dict[str, Any]]:
        if not before:
            yield self.side.defaults()
        if len(before) == self._begun[-1] and self._nudged is not None:
            yield self._nudged
        if not wanted:
            return
        if self.sampler == "tpe" and len(before) < _SPREAD:
            yield from spread(self.side, self.seed, len(before))
        yield from (
            grids(self.side, self.seed) if self.sampler == "grid" else self._sampled(before, wanted)
        )
        if self.side.size < math.inf:
            yield from self.side.points()

    def _sampled(self, before: Sequence[Tried], wanted: int) -> Iterator[dict[str, Any]]:
        optuna = library("optuna", "tuning", PURPOSE)
        seed = derived(self.seed, f"{len(self._begun)}/{len(before) - self._begun[-1]}")
        with silent(optuna):
            if self.sampler == "random":
                sampler = optuna.samplers.RandomSampler(seed=seed)
            else:
                sampler = optuna.samplers.TPESampler(
                    seed=seed, n_startup_trials=_SPREAD, constant_liar=True
                )
            study = optuna.create_study(sampler=sampler)
            for tried in before:
                study.add_trial(frozen_trial(self.side, tried.settings, tried.told))
        for _ in range(_ASKED * wanted):
            with silent(optuna):
                params = study.ask(distributions(self.side)).params
            yield self._values(params)

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Optuna's parameters as settings: of a list it has the value's place."""
        return {
            name: one.values[params[name]] if one.values else one.tidy(params[name])
            for name, one in self.side.dimensions.items()
        }


def check_sampler(sampler: str) -> None:
    """Refuse a sampler that is none.

    Raises:
        InputError: so it is.
    """
    if sampler not in SAMPLERS:
        raise InputError(
            "no such sampler",
            field="sampler",
            value=sampler,
            allowed=", ".join(SAMPLERS),
            candidates=SAMPLERS,
        )


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)
