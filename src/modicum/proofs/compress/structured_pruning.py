"""Structured pruning by a first-order score, by magnitude, and of random units, at equal widths.

The claim is that what the score chooses is missed less than as many random units. A decoder of
characters of Python's standard library loses a quarter of the neurons and of the heads of every
block (in the full experiment half of them too), and its loss on held-out text is taken at once and
after recovery. Each seed draws other random units, other examples to score by, and other batches to
recover with. The best simple alternative is magnitude, which looks at no data.

The full experiment's decoder has three blocks of width 128 and 1,500 steps of training, and 200 of
recovery. The quick one's has two, 400 steps, and 40 of recovery, only at a quarter.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from modicum.compress.structured_pruning import StructuredPruning
from modicum.core.contracts.method import Context
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.compress.recovery_bench import Code, loss
from modicum.proofs.optim.text_bench import TextSize

QUICK = TextSize(width=128, layers=2, mlp_width=256, tokens=48, rows=12, steps=400)
FULL = TextSize(width=128, layers=3, mlp_width=352, tokens=64, rows=16, steps=1500)
EXAMPLES = 96
# A quarter of the rise is what random units must cost more for the choice to be worth a pass.
AT_ONCE, RECOVERED = 0.75, 0.9


@dataclass(frozen=True)
class Rise:
    """Losses above those of the dense model: at once, and where both were trained on as much."""

    at_once: float
    recovered: float


def prove(run: ProofRun) -> None:
    """First-order scores against random units at equal widths, with magnitude alongside."""
    run.seeds = (0, 1, 2, 3, 4) if run.full else (0, 1)
    size, steps, rows = (FULL, 200, 256) if run.full else (QUICK, 40, 96)
    first = Code(size, steps, rows)
    tasks = [Code(size, steps, rows, first, seed) for seed in run.seeds]
    bench = _Bench(run, tasks)
    over_magnitude: list[float] = []
    for share in (0.25, 0.5) if run.full else (0.25,):
        method, null = (_pruning("first_order", share), _pruning("random", share))
        contender = run.contender(method, null=null, null_is=f"random units at {share}")
        ours, random, magnitude = (
            bench.rises(value) for value in (contender, null, _pruning("magnitude", share))
        )
        for name in ("at_once", "recovered"):
            mine, theirs, others = (
                [getattr(rise, name) for rise in arm] for arm in (ours, random, magnitude)
            )
            where = f"{name.replace('_', ' ')}, {share:.0%} removed"
            over = run.figure(
                f"loss above the dense model's, {where} (nats)",
                method=mean(mine),
                baseline=mean(theirs),
                claimed="less than of random units",
            )
            run.figure(
                f"the same over magnitude's, {where}", method=mean(mine), baseline=mean(others)
            )
            bar = AT_ONCE if name == "at_once" else RECOVERED
            each = ratios(mine, theirs)
            run.at_most(f"its rise over that of random units, {where}", over.ratio, bar, seeds=each)
            if name == "recovered":
                over_magnitude += ratios(mine, others)
    run.against("magnitude at equal widths", "rise after recovery, each seed", over_magnitude)


def _pruning(
    score: Literal["first_order", "magnitude", "random"], share: float
) -> StructuredPruning:
    return StructuredPruning(score=score, neurons=share, groups=share, examples=EXAMPLES)


class _Bench:
    """Arms of one decoder, a seed each; what was trained once is known."""

    def __init__(self, run: ProofRun, tasks: list[Code]) -> None:
        self.run, self.tasks = run, tasks
        self._known: dict[tuple[StructuredPruning | None, int], tuple[float, float]] = {}

    def rises(self, value: StructuredPruning) -> list[Rise]:
        """What each seed's decoder loses against its dense one."""
        found = []
        for place in range(len(self.tasks)):
            before, after = self._losses(value, place)
            dense_before, dense_after = self._losses(None, place)
            found.append(Rise(before - dense_before, after - dense_after))
        return found

    def _losses(self, value: StructuredPruning | None, place: int) -> tuple[float, float]:
        if (value, place) not in self._known:
            task, name = self.tasks[place], "dense" if value is None else value.score
            self.run.progress(f"code: {name}")
            model = copy.deepcopy(task.model)
            if value is not None:
                batches = [task.train_batch(f"calibration {number}") for number in range(16)]
                calibration = value.calibrate(
                    model, batches, lambda model, batch: loss(model, batch, "sum")
                )
                value.bind(Context(model, task.seed)).fit(calibration)
            before = task.score(model, "test")
            task.train(model, "recovery", task.steps, task.rate)
            self._known[value, place] = before, task.score(model, "test")
        return self._known[value, place]
