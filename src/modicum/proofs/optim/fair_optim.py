"""The proof of the fair benchmark: known optima, known speed-ups, and tuning that decides.

That the protocol finds what is there is shown on losses with a known optimum and on data with a
known speed-up. What it is for is shown on a character model: AdamW at its best settings needs less
data than at the defaults that others are compared with by as much as many a published speed-up; and
the same method on both sides, each tuned, comes out equal. The null of the latter is what the paper
finds in the literature: one side tuned, the other left at its default, with the same method on
both. Speed-ups of other optimizers, and curves that cross before the end, are figures and no
criterion.

Reduced: one size of three thousand parameters and AdamW alone in the quick proof; sizes of 12, 24
and 49 thousand instead of 130 million and more in the full one, in 4 data ratios, with Lion and
Muon where they are in the catalog. It takes about two hours of one core, and resumes, as each
training is kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modicum.core.contracts.catalog import built_in
from modicum.optim import FairOptim
from modicum.optim.fair_findings import FairReport
from modicum.optim.protocol import ProtocolContext, carry_out
from modicum.optim.protocol_trials import ProtocolRegime, ProtocolTrial
from modicum.optim.search_grid import SearchGrid
from modicum.proofs.base import ProofRun
from modicum.proofs.optim.fair_bench import FairBench, parameters_of, takes
from modicum.proofs.optim.fair_known import (
    RATIOS,
    Space,
    beyond_the_grid,
    the_known_optimum,
    the_known_speedup,
)
from modicum.proofs.optim.text_bench import TextSize

REFERENCE, AGAIN = "adamw", "adamw again"
WARM_UP = SearchGrid((0.02, 0.1, 0.3), 0.1)
DECAY = SearchGrid((0.0, 0.1, 0.3), 0.0)
QUICK_SPACE: Space = {"learning_rate": SearchGrid((1e-3, 4e-3, 1.6e-2), 1e-3, "log")}
# Defaults are the classes' own: what somebody takes who does not tune.
FULL_SPACES: Mapping[str, Space] = {
    "adamw": {
        "learning_rate": SearchGrid((1e-3, 4e-3, 1.6e-2), 1e-3, "log"),
        "weight_decay": DECAY,
        "warm_up": WARM_UP,
        "betas": SearchGrid(((0.9, 0.95), (0.9, 0.99), (0.8, 0.95)), (0.9, 0.95)),
    },
    "lion": {
        "learning_rate": SearchGrid((1e-4, 4e-4, 1.6e-3), 1e-4, "log"),
        "weight_decay": DECAY,
        "warm_up": WARM_UP,
        "betas": SearchGrid(((0.9, 0.99), (0.9, 0.95), (0.95, 0.98)), (0.9, 0.99)),
    },
    "muon": {
        "learning_rate": SearchGrid((4e-3, 1.6e-2, 6.4e-2), 1.6e-2, "log"),
        "weight_decay": DECAY,
        "warm_up": WARM_UP,
        "momentum": SearchGrid((0.9, 0.95, 0.98), 0.95),
        "adam_rate": SearchGrid((0.05, 0.2, 0.8), 0.2, "log"),
    },
}
QUICK_SIZES = (TextSize(width=16, layers=1, mlp_width=40, tokens=32, rows=16, steps=1),)
FULL_SIZES = (
    TextSize(width=32, layers=1, mlp_width=80, tokens=64, rows=16, steps=1),
    TextSize(width=32, layers=2, mlp_width=80, tokens=64, rows=16, steps=1),
    TextSize(width=64, layers=1, mlp_width=172, tokens=64, rows=16, steps=1),
)
QUICK_TOKENS, FULL_TOKENS = 10.0, 20.0  # a parameter, at ratio 1


def prove(run: ProofRun) -> None:
    """Known optima, known speed-ups, one side left untuned."""
    the_known_optimum(run)
    beyond_the_grid(run)
    the_known_speedup(run)
    both_sides_tuned(run)


@dataclass(frozen=True)
class SweptSides:
    """Who takes part, over what.

    Args:
        spaces: of each side; `methods` are their optimizers' names.
    """

    spaces: Mapping[str, Space]
    methods: Mapping[str, str]
    sizes: tuple[TextSize, ...]
    tokens: float
    value: FairOptim = field(default_factory=FairOptim)

    def report(self, run: ProofRun) -> tuple[FairReport, FairBench]:
        """All trials, each trained once, and what they amount to."""
        sizes = {parameters_of(size): size for size in self.sizes}
        bench = FairBench(run, sizes, self.methods)
        regimes = [ProtocolRegime(n, ratio, self.tokens) for n in sizes for ratio in RATIOS]
        runtime = self.value.bind(ProtocolContext(self.spaces, regimes, reference=REFERENCE))

        def progress(trial: ProtocolTrial, done: int) -> None:
            where = f"{trial.regime.parameters} parameters, ratio {trial.regime.ratio:g}"
            run.progress(f"{trial.part} {trial.side}, {where}, {_words(trial.settings)}")

        report: FairReport = carry_out(runtime, bench.trial, progress)
        return report, bench


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def sides_of(run: ProofRun) -> SweptSides:
    """AdamW twice; in the full proof the other optimizers of the catalog too."""
    if not run.full:
        spaces: dict[str, Space] = {REFERENCE: QUICK_SPACE, AGAIN: QUICK_SPACE}
        value = FairOptim(seeds=2, extensions=3)
        methods = {REFERENCE: "adamw", AGAIN: "adamw"}
        return SweptSides(spaces, methods, QUICK_SIZES, QUICK_TOKENS, value)
    there = {
        name: {key: grid for key, grid in space.items() if takes(name, key)}
        for name, space in FULL_SPACES.items()
        if built_in(name) is not None
    }
    methods = {name: name for name in there} | {AGAIN: REFERENCE}
    spaces = {**there, AGAIN: there[REFERENCE]}
    return SweptSides(spaces, methods, FULL_SIZES, FULL_TOKENS, FairOptim(seeds=3))


def untuned(space: Space) -> Space:
    """The space of a side that is left at its default."""
    return {name: grid.fixed(grid.default) for name, grid in space.items()}


def both_sides_tuned(run: ProofRun) -> None:
    """The same method on both sides comes out equal; tuned, it needs less data than untuned."""
    sides = sides_of(run)
    run.seeds = tuple(range(1, 1 + sides.value.seeds))
    own = sides.spaces[REFERENCE]
    other = run.contender(
        own, null=untuned(own), null_is="one side tuned, the other left at its default"
    )
    spaces = {**sides.spaces, AGAIN: other}
    report, bench = _with(sides, spaces).report(run)
    _show(run, report)
    off = max(abs(other / own - 1) for own, other in _on_one_curve(report))
    run.at_most("largest speed-up over itself of a method that is on both sides", off, 0.05)
    orders = max(len(found) for found in bench.orders.values())
    run.at_most("orders of tokens in a regime from a seed", orders, 1, part="check")
    tuned = run.contender(own, null=untuned(own), null_is="AdamW at its default on both sides")
    if tuned is not other:
        report, _ = _with(sides, {REFERENCE: tuned, AGAIN: tuned}).report(run)
    saved = [one for one in report.over_default if one.side == REFERENCE]
    least = min(saved, key=lambda one: one.speedup.speedup or 0.0)
    run.at_least(
        "data speed-up of AdamW over its default, the least of all sizes and ratios",
        least.speedup.speedup or 0.0,
        1.3,
        seeds=least.speedup.by_seed,
    )


def _on_one_curve(report: FairReport) -> list[tuple[float, float]]:
    """D_eff / D of the reference and of its double, by the reference's curve, regime by regime.

    The former is 1 but for what the curve misses of the reference's own losses.
    """
    of: dict[str, list[float]] = {REFERENCE: [], AGAIN: []}
    for one in report.speedups:
        if one.side in of:
            of[one.side].append(one.speedup.speedup or math.inf)
    return list(zip(of[REFERENCE], of[AGAIN], strict=True))


def _with(sides: SweptSides, spaces: Mapping[str, Space]) -> SweptSides:
    methods = {side: sides.methods[side] for side in spaces}
    return SweptSides(spaces, methods, sides.sizes, sides.tokens, sides.value)


def _show(run: ProofRun, report: FairReport) -> None:
    """Data speed-ups, what tuning saves, and curves that cross, as figures."""
    for one in (*report.over_default, *report.speedups):
        if one.side == AGAIN or (one.side == REFERENCE and one.over == REFERENCE):
            continue
        found, where = one.speedup, f"{one.parameters} parameters, ratio {one.ratio:g}"
        if found.speedup is None:
            continue
        name, other = f"data speed-up of {one.side} over {one.over}, {where}", one.over == REFERENCE
        run.figure(
            name,
            method=found.speedup,
            baseline=1,
            claimed="at most 1.4 at 130M, 1.1 at 1.2B parameters" if other else "",
        )
        if other and found.interval is not None:
            for end, value in zip(("lower", "upper"), found.interval, strict=True):
                run.figure(f"{end} end of its interval over seeds", method=value, baseline=1)
    for row in report.findings:
        if row.side != AGAIN and row.losses and row.default_losses:
            where = f"{row.parameters} parameters, ratio {row.ratio:g}"
            run.figure(
                f"held-out loss of {row.side} (nats) over its default's, {where}",
                method=statistics.fmean(row.losses),
                baseline=statistics.fmean(row.default_losses),
            )
    for side, kinds in report.sensitivity.items():
        if side != AGAIN and kinds:
            name = f"hyper-parameters of {side} that are sensitive to scale, of all"
            sensitive = sum(one.sensitive for one in kinds)
            run.figure(name, method=sensitive, baseline=len(kinds))
            for key, law in report.laws[side].items():
                name = f"{key} of {side} in the last regime, predicted over found"
                run.figure(name, method=law.predicted, baseline=law.found)
    misses = [abs(own - 1) for own, _ in _on_one_curve(report)]
    run.figure(
        "most that a curve misses of its own losses, in data", method=1 + max(misses), baseline=1
    )
    crossed = [one for one in report.crossings if AGAIN not in (one.one, one.other)]
    if crossed:
        run.figure(
            "pairs of curves that cross before the end, of all",
            method=sum(bool(one.shares) for one in crossed),
            baseline=len(crossed),
            claimed="rankings change in training",
        )
