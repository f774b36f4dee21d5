"""The trials of a fair benchmark: who is tuned where, over what, and what the judges say.

Every side is tuned by coordinate descent over all its hyper-parameters in the smallest size and at
the ratio nearest to 1. Those of which no one value is near-optimal in all these regimes are swept
in the others too. Fresh seeds judge the best settings, and the defaults, in every regime.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modicum.optim.coordinate_descent import CoordinateDescent, GridPoint, key_of
from modicum.optim.protocol import ComparisonProtocol, ProtocolContext, ProtocolRuntime
from modicum.optim.protocol_trials import ProtocolRegime, ProtocolTrial, TrialResult
from modicum.optim.search_grid import SearchGrid


@dataclass(frozen=True)
class SearchRules:
    """How far a search goes.

    Args:
        deviations: settings are near-optimal whose loss is above the least one by at most so many
            standard deviations over seeds.
        seeds: that judge.
        extensions: values by which a grid is extended at each end.
        most: settings in a regime; None: as many as it takes.
    """

    deviations: float
    seeds: int
    extensions: int
    most: int | None


class RegimeSearch:
    """One side in one regime: the descent, and the judges of its best settings and its default."""

    def __init__(
        self,
        side: str,
        regime: ProtocolRegime,
        space: Mapping[str, SearchGrid],
        default: GridPoint,
        rules: SearchRules,
        seed: int,
    ) -> None:
        self.side, self.regime, self.default, self.rules = side, regime, dict(default), rules
        self.descent = CoordinateDescent(space, most=rules.most, extensions=rules.extensions)
        self.seeds = range(seed + 1, seed + 1 + rules.seeds)
        self._seed = seed
        self._judged: dict[str, dict[int, TrialResult]] = {}
        self._waiting: dict[str, ProtocolTrial] = {}

    def wanted(self) -> list[ProtocolTrial]:
        """The trials whose results are missing; none: the search has ended."""
        if not self._waiting:
            self._waiting = {trial.key: trial for trial in self._wave()}
        return list(self._waiting.values())

    def take(self, trial: ProtocolTrial, result: TrialResult) -> None:
        """Take in the result of a trial that is wanted."""
        del self._waiting[trial.key]
        if trial.part == "tune":
            self.descent.tell(trial.settings, result.loss)
        else:
            self._judged.setdefault(key_of(trial.settings), {})[trial.seed] = result

    def judged(self, point: GridPoint | None) -> list[TrialResult]:
        """What fresh seeds made of these settings, seed by seed; nothing until all did."""
        found = {} if point is None else self._judged.get(key_of(point), {})
        return [found[seed] for seed in self.seeds] if len(found) == len(self.seeds) else []

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds: of the best settings, or else of the default.

        Where neither is known, or a seed diverged, 0: then nothing else is as good as the best.
        """
        for point in (self.descent.best, self.default):
            losses = [result.loss for result in self.judged(point)]
            if losses and all(map(math.isfinite, losses)):
                return statistics.stdev(losses)
        return 0.0

    @property
    def near(self) -> list[dict[str, Any]]:
        """The near-optimal settings, the best first."""
        return self.descent.near(self.rules.deviations * self.deviation)

    def _wave(self) -> list[ProtocolTrial]:
        self.descent.tolerance = self.rules.deviations * self.deviation
        points = self.descent.ask()
        best = None if points else self.descent.best
        judged = [self.default, *([] if best is None else [best])]
        trials = [self._trial(point, self._seed, "tune") for point in points]
        wanted = {
            trial.key: trial
            for point in judged
            if not self.judged(point)
            for trial in (self._trial(point, seed, "judge") for seed in self.seeds)
        }
        return [*trials, *wanted.values()]

    def _trial(self, point: GridPoint, seed: int, part: Any) -> ProtocolTrial:
        return ProtocolTrial(self.side, self.regime, dict(point), seed, part)


@dataclass(frozen=True)
class Sensitivity:
    """Whether one value of a hyper-parameter is near-optimal in all regimes of full descent.

    Args:
        stable: such values, those of the least loss first; none: it is scaling-sensitive.
    """

    name: str
    stable: tuple[Any, ...] = field(default=())

    @property
    def sensitive(self) -> bool:
        """Whether it has to be swept again elsewhere."""
        return not self.stable


def sensitivities(searches: Sequence[RegimeSearch]) -> list[Sensitivity]:
    """Which hyper-parameters of a side are stable over the regimes of these searches.

    A regime without a finite loss says nothing.
    """
    told = [search for search in searches if search.descent.best is not None]
    names = list(told[0].descent.grids) if told else []
    found = []
    for name in names:
        excess: dict[str, float] = {}
        values: dict[str, Any] = {}
        common: set[str] | None = None
        for search in told:
            here = {key_of({name: point[name]}): point[name] for point in search.near}
            common = set(here) if common is None else common & set(here)
            values |= here
            for key, value in here.items():
                losses = [loss for point, loss in search.descent.tried if point[name] == value]
                excess[key] = excess.get(key, 0.0) + min(losses) - search.descent.best_loss
        ordered = sorted(common or (), key=lambda key: (excess[key], key))
        found.append(Sensitivity(name, tuple(values[key] for key in ordered)))
    return found


class FairSearch(ProtocolRuntime):
    """The benchmark at work: a search for each side and regime."""

    def __init__(
        self,
        method: ComparisonProtocol,
        context: ProtocolContext,
        rules: SearchRules,
        *,
        sweep_all: bool,
    ) -> None:
        super().__init__(method, context)
        self.rules = rules
        self.regimes = sorted(context.regimes, key=lambda one: (one.parameters, one.tokens))
        least = self.regimes[0].parameters
        middle = min(self.regimes, key=lambda one: (abs(math.log(one.ratio)), one.ratio)).ratio
        self.full = [
            one
            for one in self.regimes
            if sweep_all or one.parameters == least or one.ratio == middle
        ]
        self.searches: dict[tuple[str, ProtocolRegime], RegimeSearch] = {}
        for side, space in context.sides.items():
            for regime in self.full:
                self._begin(side, regime, space)

    def wanted(self) -> list[ProtocolTrial]:
        """What all sides want; they do not wait for each other."""
        trials = []
        for side in self.context.sides:
            ours = self._wanted_by(side)
            if not ours and len(self.of(side)) < len(self.regimes):
                self._begin_others(side)
                ours = self._wanted_by(side)
            trials += ours
        return trials

    def take(self, trial: ProtocolTrial, result: TrialResult) -> None:
        """Give a result to the search that wants it."""
        self.searches[trial.side, trial.regime].take(trial, result)

    def of(self, side: str) -> list[RegimeSearch]:
        """The searches of a side so far, by regime."""
        found = (self.searches.get((side, regime)) for regime in self.regimes)
        return [search for search in found if search is not None]

    def in_full(self, side: str) -> list[RegimeSearch]:
        """A side's searches over all its hyper-parameters."""
        return [self.searches[side, regime] for regime in self.full]

    def _wanted_by(self, side: str) -> list[ProtocolTrial]:
        return [trial for search in self.of(side) for trial in search.wanted()]

    def _begin(self, side: str, regime: ProtocolRegime, space: Mapping[str, SearchGrid]) -> None:
        default = {name: grid.default for name, grid in self.context.sides[side].items()}
        self.searches[side, regime] = RegimeSearch(
            side, regime, space, default, self.rules, self.context.seed
        )

    def _begin_others(self, side: str) -> None:
        """Sweep what is sensitive in the other regimes, from the best of the nearest one."""
        stable = {one.name: one.stable[:1] for one in sensitivities(self.in_full(side))}
        for regime in self.regimes:
            if (side, regime) in self.searches:
                continue
            nearest = min(self.in_full(side), key=lambda search: _distance(search.regime, regime))
            best = nearest.descent.best or nearest.descent.start
            self._begin(
                side,
                regime,
                {
                    name: grid.fixed(stable[name][0])
                    if stable.get(name)
                    else grid.begun_at(best[name])
                    for name, grid in nearest.descent.grids.items()
                },
            )


def _distance(one: ProtocolRegime, other: ProtocolRegime) -> float:
    """How far two regimes are apart, in the logarithms of size and of ratio."""
    size = math.log(one.parameters / other.parameters)
    return abs(size) + abs(math.log(one.ratio / other.ratio))
