"""The sweep of all proofs: arms, each at learning rates of its own, each rate from several seeds.

An arm is judged at the best of its rates. Where that lies at an end of the grid, the grid is
continued until it does not: an arm that would be better still further out is not known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from modicum.proofs.base import ProofRun
from modicum.proofs.bench.arm_trials import ArmTrials

A = TypeVar("A")
T = TypeVar("T")
_STEP = 2.0  # between rates where there is only one
_FURTHER = 4  # rates that a grid is continued by


@dataclass(frozen=True)
class Swept(Generic[T]):
    """An arm at the best of its learning rates.

    Attributes:
        outcomes: of each seed.
        rates: all that were tried, ascending.
    """

    learning_rate: float
    outcomes: tuple[T, ...]
    rates: tuple[float, ...]

    def each(self, figure: str) -> list[float]:
        """One of an outcome's numbers, of each seed."""
        return [getattr(outcome, figure) for outcome in self.outcomes]

    def mean(self, figure: str) -> float:
        """The mean of one of an outcome's numbers over the seeds."""
        return statistics.fmean(self.each(figure))


class Sweep(Generic[A, T]):
    """Arms trained at learning rates from seeds; what was trained is known.

    Args:
        train: an arm, which is hashable, at a rate from a seed.
        score: of an outcome, less is better.
        chosen_by: whether the rate is chosen by the mean over all seeds, or by the first seed
            alone; the others are then trained at that rate only.
        shared: of arms that other proofs train too, what decides an outcome next to arm, rate and
            seed: these are trained once (`ArmTrials`).
        kind: the outcome's class, for arms that are shared.
        facts: of an arm, what it is known by among what decides an outcome; None: its `repr`.
    """

    def __init__(
        self,
        run: ProofRun,
        train: Callable[[A, float, int], T],
        score: Callable[[T], float],
        *,
        chosen_by: Literal["all", "first"] = "all",
        shared: Mapping[str, Any] | None = None,
        kind: type[T] | None = None,
        facts: Callable[[A], Mapping[str, Any]] | None = None,
    ) -> None:
        self.run, self.score, self.chosen_by = run, score, chosen_by

        def of_arm(arm: A) -> Mapping[str, Any]:
            return {**(shared or {}), **({"arm": arm} if facts is None else facts(arm))}

        self._trials = ArmTrials(
            train, score, facts=None if shared is None else of_arm, kind=kind, fresh=run.fresh
        )
        self._known: dict[tuple[A, float, int], T] = {}

    def best(
        self,
        name: str,
        arm: A,
        rates: Sequence[float],
        *,
        score: Callable[[T], float] | None = None,
        baseline: bool = False,
    ) -> Swept[T]:
        """The arm at the best of these rates, or of the ones next to them.

        Args:
            score: another than the usual one.
            baseline: whether other proofs train it too.
        """
        tried, judge = sorted(rates), score or self.score
        deciding = self.run.seeds if self.chosen_by == "all" else self.run.seeds[:1]

        def judged(rate: float) -> float:
            outcomes = [self.outcome(name, arm, rate, seed, baseline) for seed in deciding]
            mean = statistics.fmean(map(judge, outcomes))
            return mean if math.isfinite(mean) else math.inf

        best, most = min(tried, key=judged), len(tried) + _FURTHER
        while len(tried) < most and (further := _next_to(best, tried)):
            tried = sorted([*tried, *further])
            best = min(tried, key=judged)
        swept = self.at(name, arm, best, baseline=baseline, tried=tried)
        self.run.swept(name, best, tried)
        return swept

    def at(
        self,
        name: str,
        arm: A,
        rate: float,
        *,
        baseline: bool = False,
        tried: Sequence[float] | None = None,
    ) -> Swept[T]:
        """The arm at one rate, found for it before or for what it is a variant of.

        Args:
            baseline: whether other proofs train it too.
            tried: the rates of which this is the best; None: there was no choice.
        """
        outcomes = [self.outcome(name, arm, rate, seed, baseline) for seed in self.run.seeds]
        return Swept(rate, tuple(outcomes), tuple(tried or (rate,)))

    def outcome(self, name: str, arm: A, rate: float, seed: int, baseline: bool = False) -> T:
        """What an arm comes to at one rate from one seed."""
        key = (arm, rate, seed)
        if key not in self._known:
            self.run.progress(f"learning rate {rate:g}, seed {seed}: {name}")
            self._known[key], taken = self._trials.result(arm, rate, seed, shared=baseline)
            self.run.reused += taken
        return self._known[key]


def _next_to(best: float, tried: Sequence[float]) -> list[float]:
    """The rates by which a grid is continued where the best is at an end of it."""
    if len(tried) == 1:
        return [best / _STEP, best * _STEP]
    if best == tried[0]:
        return [best * best / tried[1]]
    return [best * best / tried[-2]] if best == tried[-1] else []
