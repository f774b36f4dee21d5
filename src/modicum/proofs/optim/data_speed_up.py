"""How much more data tuned AdamW would need to come to the loss of another optimizer.

AdamW is tuned at half, at one, two and four times the budget, each with a schedule of its own. Its
loss between two budgets is read off the line through both in log(loss) over log(tokens), and off
the nearest such line beyond them. A speed-up is the tokens that AdamW needs by that curve, over
those that the optimizer had. Each seed has its own curve, of the same first weights and batches.
In full proofs AdamW may also have a quarter of the rate for matrices, since its rivals treat
classes apart, or may have that too: each budget has the better of both.

Quick proofs have AdamW at three budgets, a half, one and three, and tune it at the first seed of
one alone: at this size the best rate was the same at a half, one, two and four of it.

The fit of arXiv 2509.02046, L(D) = alpha D^-B + beta, has three parameters, and would go through
three budgets exactly, noise included; the lines are its case beta = 0, piece by piece.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from modicum.optim import AdamW
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.sweep import Sweep, Swept
from modicum.proofs.optim.text_bench import Plain, Text, TextArm, TextResult, TextSize

QUICK = TextSize(width=96, layers=1, mlp_width=256, tokens=32, rows=8, steps=70)
FULL = TextSize(width=128, layers=1, mlp_width=344, tokens=32, rows=8, steps=300)
BUDGETS = (0.5, 1.0, 2.0, 4.0)
QUICK_BUDGETS = (0.5, 1.0, 3.0)
ADAMW = AdamW.value(betas=(0.9, 0.95))
ADAMW_RATES = (1e-3, 2e-3, 4e-3)
# Where matrices have a quarter of it.
APART_RATES = (4e-3, 8e-3, 16e-3)
# The 97.5 % quantile of Student's t by its degrees of freedom, from 1.
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def equivalent_data(loss: float, curve: Mapping[float, float]) -> float:
    """Where a curve {data: loss} comes to a loss, on the lines through its points in logarithms.

    Infinite where the curve does not fall there, or the loss is no number.

    >>> round(equivalent_data(2.0, {1.0: 4.0, 4.0: 1.0}), 6)
    2.0
    """
    points = sorted(curve.items())
    segment = points[:2]
    for one, other in pairwise(points):
        segment = [one, other]
        if loss >= other[1]:
            break
    (near, high), (far, low) = segment
    if not (math.isfinite(loss) and 0 < low < high):
        return math.inf if loss < high else 0.0
    share = math.log(high / loss) / math.log(high / low)
    return near * (far / near) ** share


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower end, geometric mean and upper end of a 95 % interval of the mean, by Student's t.

    >>> [round(end, 1) for end in interval([1.0, 1.1, 1.2])]
    [0.9, 1.1, 1.4]
    """
    logs = [math.log(value) if value > 0 else -math.inf for value in values]
    mean = statistics.fmean(logs)
    if len(values) < 2 or not math.isfinite(mean):
        return 0.0, math.exp(mean), math.inf
    half = _QUANTILES[len(values) - 2] * statistics.stdev(logs) / math.sqrt(len(values))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


@dataclass(frozen=True)
class SpeedUp:
    """An optimizer against AdamW at the same tokens.

    Args:
        each: the data speed-up of each seed.
        losses: the optimizer's held-out loss over AdamW's, of each seed.
        above: how far its mean loss is above AdamW's, in deviations of AdamW's over the seeds.
    """

    each: tuple[float, ...]
    losses: tuple[float, ...]
    above: float = 0.0

    @property
    def mean(self) -> float:
        """The geometric mean over the seeds."""
        return interval(self.each)[1]

    @property
    def lower(self) -> float:
        """The lower end of the 95 % interval."""
        return interval(self.each)[0]


TunedArm = tuple[str, Plain, Sequence[float]]  # name, how it trains, its rates


class AgainstAdamW:
    """Optimizers at one budget, and AdamW at several; each at the best of its own rates.

    The rate is chosen at the first seed; the others are trained at that one.
    """

    def __init__(self, run: ProofRun) -> None:
        self.run, self.size = run, FULL if run.full else QUICK
        run.seeds = (0, 1, 2, 3, 4) if run.full else (0, 1, 2)
        self._adamw: dict[float, Swept[TextResult]] = {}

    def best(
        self, name: str, arm: Plain, rates: Sequence[float], budget: float = 1.0
    ) -> Swept[TextResult]:
        """An optimizer at the best of its rates, with so many times the budget."""
        return self.sweep(budget).best(name, arm, rates, baseline=arm.method == ADAMW)

    def sweep(self, budget: float) -> Sweep[TextArm, TextResult]:
        """Trainings with so many times the budget."""
        size = replace(self.size, steps=round(self.size.steps * budget))

        def trained(arm: TextArm, rate: float, seed: int) -> TextResult:
            return Text(size, seed).train(arm, rate)

        return Sweep(
            self.run,
            trained,
            lambda result: result.loss,
            chosen_by="first",
            shared={"bench": "text", "size": size},
            kind=TextResult,
        )

    def adamw(self, budget: float) -> Swept[TextResult]:
        """AdamW at the best of its rates: alike for all, or in full proofs apart for matrices."""
        if budget not in self._adamw:
            self._adamw[budget] = self._trained_adamw(budget)
        return self._adamw[budget]

    def _trained_adamw(self, budget: float) -> Swept[TextResult]:
        words = f"{budget:g} of the budget"
        if budget != 1.0 and not self.run.full:
            rate, sweep = self.adamw(1.0).learning_rate, self.sweep(budget)
            name, arm = f"AdamW, {words}", Plain(ADAMW)
            each = (sweep.outcome(name, arm, rate, seed, True) for seed in self.run.seeds)
            return Swept(rate, tuple(each), (rate,))
        found = [self.best(f"AdamW, {words}", Plain(ADAMW), ADAMW_RATES, budget)]
        if self.run.full:
            apart = Plain(ADAMW, 0.25)
            found.append(
                self.best(f"AdamW, matrices a quarter, {words}", apart, APART_RATES, budget)
            )
        return min(found, key=lambda swept: swept.outcomes[0].loss)

    def speed_up(
        self, name: str, arms: Sequence[TunedArm], *, claimed: str, adamw_has: float = 1.0
    ) -> SpeedUp:
        """The data speed-up of the best of an optimizer's arms, noted with interval and losses.

        Args:
            adamw_has: times the budget, where the optimizer is AdamW itself, of a null.
        """
        budgets = BUDGETS if self.run.full else QUICK_BUDGETS
        curve = {budget: self.adamw(budget) for budget in budgets}
        adam = curve[1.0]
        found_arms = [
            curve[adamw_has] if arm.method == ADAMW else self.best(words, arm, rates)
            for words, arm, rates in arms
        ]
        ours = min(found_arms, key=lambda swept: swept.outcomes[0].loss)
        each = []
        for seed, loss in enumerate(ours.each("loss")):
            points = {budget: swept.each("loss")[seed] for budget, swept in curve.items()}
            each.append(equivalent_data(loss, points))
        mine, theirs = ours.each("loss"), adam.each("loss")
        above = (statistics.fmean(mine) - statistics.fmean(theirs)) / statistics.stdev(theirs)
        found = SpeedUp(tuple(each), tuple(ratios(mine, theirs)), above)
        tokens = self.size.steps * self.size.rows * self.size.tokens
        low, mean, high = interval(found.each)
        for words, end, said in (
            ("", mean, claimed),
            (", lower end", low, ""),
            (", upper end", high, ""),
        ):
            self.run.figure(
                f"{name}: tokens for the same loss{words}",
                method=tokens,
                baseline=tokens * end,
                claimed=said,
            )
        self.run.figure(
            f"{name}: held-out loss (nats)", method=ours.mean("loss"), baseline=adam.mean("loss")
        )
        self.run.figure(
            f"{name}: learning rate", method=ours.learning_rate, baseline=adam.learning_rate
        )
        return found
