"""What is forgotten of that which training does not touch, at an equal loss of what it does.

The decoder of `permutation_bench` learns the new permutations of two modes from these modes alone.
Every few updates its loss is measured on them, and on the two modes that it has not seen since: so
a run is a curve, and runs are compared where they have come to the same loss.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.contracts.parameters import trainable
from modicum.proofs.adapters.permutation_bench import (
    CHANGED,
    FullTuning,
    PermutationBench,
    TuningContender,
)
from modicum.proofs.bench.permutations import MODES
from modicum.proofs.bench.sweep import Sweep

EVERY = 10  # updates between two points
_NEW, _OLD = range(CHANGED), range(CHANGED, MODES)


@dataclass(frozen=True)
class ForgettingCurve:
    """Points of a run, in its order: excess losses on what is learned, and on what is not seen."""

    learned: tuple[float, ...]
    unseen: tuple[float, ...]

    @property
    def reached(self) -> float:
        """The lowest loss on what is learned."""
        return min(self.learned)

    def at(self, loss: float) -> float:
        """What the unseen loss is where the learned one has first come down to `loss`; or inf.

        >>> ForgettingCurve((2.0, 1.0), (0.0, 0.5)).at(1.5)
        0.25
        """
        points = list(zip(self.learned, self.unseen, strict=True))
        for (before, old), (after, new) in pairwise(points):
            if after <= loss < before:
                return old + (new - old) * (before - loss) / (before - after)
        return math.inf


class ForgettingBench:
    """Runs on the model and the permutations of a `PermutationBench`, each made once."""

    def __init__(self, bench: PermutationBench) -> None:
        self.bench = bench
        self._sweep: Sweep[TuningContender, ForgettingCurve] = Sweep(
            bench.sweep.run, self._trained, lambda curve: curve.reached
        )

    def curve(self, contender: TuningContender, rate: float, seed: int) -> ForgettingCurve:
        """A contender at one rate from one seed."""
        return self._sweep.outcome("forgetting", contender, rate, seed)

    def _trained(self, contender: TuningContender, rate: float, seed: int) -> ForgettingCurve:
        bench, model = self.bench, copy.deepcopy(self.bench.base)
        table, hooks = bench.new(seed), RunHooks()
        if not isinstance(contender, FullTuning):
            hooks.add("adapter", contender.run_hook(contender.attach(model, seed=seed)))
        parameters = [parameter for _, parameter in trainable(model)]
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
        points: list[tuple[float, float]] = []

        def measure(step: int) -> None:
            if step % EVERY == EVERY - 1:
                each = [bench.source.excess(model, table, modes) for modes in (_NEW, _OLD)]
                points.append((each[0], each[1]))
                model.train()

        measure(EVERY - 1)
        bench.fit(model, optimizer, table, bench.size.steps, 1 + seed, hooks, _NEW, measure)
        learned, unseen = zip(*points, strict=True)
        return ForgettingCurve(learned, unseen)
