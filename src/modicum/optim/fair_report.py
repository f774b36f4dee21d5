"""From results of a fair benchmark to what they amount to: speed-ups, laws, crossings, notes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from modicum.core.data_speedup import DataSpeedup, crossings, data_speedups
from modicum.core.errors import InputError
from modicum.core.scaling_fit import LEAST_DATA, LEAST_REGIMES, HeldOutFit, held_out_fit
from modicum.optim.fair_findings import (
    Crossing,
    FairReport,
    RegimeFinding,
    SeedLosses,
    SpeedupFinding,
)
from modicum.optim.fair_search import FairSearch, RegimeSearch, sensitivities
from modicum.optim.protocol_trials import LossCurve, ProtocolRegime, TrialResult

BySize = dict[float, SeedLosses]


def report_of(search: FairSearch) -> FairReport:
    """What the results of a benchmark so far amount to."""
    sides = list(search.context.sides)
    reference = search.context.reference or sides[0]
    notes = list(_notes(search))
    tuned = {side: _losses(search, side) for side in sides}
    speedups: list[SpeedupFinding] = []
    over_default: list[SpeedupFinding] = []
    for side in sides:
        speedups += _speedups(search, side, reference, tuned[reference], tuned[side], notes)
        defaults = _losses(search, side, default=True)
        found = _speedups(search, side, f"{side} at its default", tuned[side], defaults, notes)
        over_default += [_inverse(one) for one in found]
    return FairReport(
        reference,
        tuple(_finding(each) for side in sides for each in search.of(side)),
        {side: tuple(sensitivities(search.in_full(side))) for side in sides},
        {side: _laws(search, side) for side in sides},
        tuple(speedups),
        tuple(over_default),
        tuple(_crossings(search)),
        tuple(dict.fromkeys(notes)),
    )


def _finding(search: RegimeSearch) -> RegimeFinding:
    descent, regime = search.descent, search.regime
    results = search.judged(descent.best)
    names = set.intersection(*(set(result.metrics) for result in results)) if results else set()
    return RegimeFinding(
        search.side,
        regime.parameters,
        regime.ratio,
        regime.tokens,
        descent.best,
        descent.best_loss,
        tuple(result.loss for result in results),
        tuple(result.loss for result in search.judged(search.default)),
        search.deviation,
        len(search.near),
        len(descent.tried),
        descent.complete,
        descent.edges,
        {
            name: statistics.fmean(result.metrics[name] for result in results)
            for name in sorted(names)
        },
    )


def _losses(search: FairSearch, side: str, *, default: bool = False) -> dict[int, BySize]:
    """By size of model, then tokens: the losses of fresh seeds, where all are there."""
    found: dict[int, BySize] = {}
    for each in search.of(side):
        results = each.judged(each.default if default else each.descent.best)
        if results:
            losses = tuple(result.loss for result in results)
            found.setdefault(each.regime.parameters, {})[each.regime.tokens] = losses
    return found


def _speedups(
    search: FairSearch,
    side: str,
    over: str,
    curves: Mapping[int, BySize],
    losses: Mapping[int, BySize],
    notes: list[str],
) -> Iterator[SpeedupFinding]:
    """Of one side's losses on the curves of another; a size whose curve does not fit is noted."""
    ratios = {(one.parameters, one.tokens): one.ratio for one in search.regimes}
    for parameters, by_size in losses.items():
        curve = curves.get(parameters, {})
        if len(curve) < LEAST_DATA:
            continue
        try:
            found = data_speedups(curve, by_size)
        except InputError as error:
            notes.append(f"no curve of {over} at {parameters} parameters: {error}")
            continue
        for one in found:
            ratio = ratios[parameters, int(one.data)]
            yield SpeedupFinding(side, over, parameters, ratio, one)


def _inverse(finding: SpeedupFinding) -> SpeedupFinding:
    """What tuning saves, where the default's losses were put on the tuned side's curve."""
    found = finding.speedup
    if found.speedup is None:
        return finding
    interval = None
    if found.interval is not None:
        interval = (1 / found.interval[1], 1 / found.interval[0])
    turned = DataSpeedup(
        found.data,
        found.effective,
        1 / found.speedup,
        interval,
        tuple(1 / one for one in found.by_seed),
        found.extrapolated,
    )
    return SpeedupFinding(finding.side, finding.over, finding.parameters, finding.ratio, turned)


def _laws(search: FairSearch, side: str) -> dict[str, HeldOutFit]:
    found = {}
    for one in sensitivities(search.in_full(side)):
        points = [
            (each.regime.parameters, each.regime.ratio, each.descent.best[one.name])
            for each in search.of(side)
            if each.descent.best is not None and each.descent.grids[one.name].scale != "list"
        ]
        if one.sensitive and len(points) >= LEAST_REGIMES:
            found[one.name] = held_out_fit(points)
    return found


def _crossings(search: FairSearch) -> Iterator[Crossing]:
    for one, other in combinations(search.context.sides, 2):
        for regime in search.regimes:
            curves = [
                _mean_curve(each.judged(each.descent.best))
                for side in (one, other)
                if (each := search.searches.get((side, regime))) is not None
            ]
            if len(curves) < 2 or not all(curves):
                continue
            if [share for share, _ in curves[0]] == [share for share, _ in curves[1]]:
                shares = tuple(crossings(*curves))
                yield Crossing(one, other, regime.parameters, regime.ratio, shares)


def _mean_curve(results: Sequence[TrialResult]) -> LossCurve:
    """The mean over seeds; nothing where they are not at the same shares of training."""
    shares = {tuple(share for share, _ in result.curve) for result in results}
    if len(shares) != 1:
        return ()
    [ours] = shares
    columns = zip(*(result.curve for result in results), strict=True)
    means = [statistics.fmean(loss for _, loss in column) for column in columns]
    return tuple(zip(ours, means, strict=True))


def _notes(search: FairSearch) -> Iterator[str]:
    """What makes it less than fair: a side that was not tuned, searches that ended too early."""
    spaces = search.context.sides
    tuned = {
        side for side, grids in spaces.items() if any(len(g.values) > 1 for g in grids.values())
    }
    for side in spaces:
        if tuned and side not in tuned:
            yield f"{side} was left at its default while {', '.join(sorted(tuned))} was tuned"
        for each in search.of(side):
            where = f"{side} at {_where(each.regime)}"
            if each.wanted():
                yield f"{where}: trials are missing"
            elif each.descent.best is None:
                yield f"{where}: none of {len(each.descent.tried)} settings has a finite loss"
            elif not each.descent.complete:
                yield f"{where}: the search ended before all neighbours were tried"
            elif each.descent.edges:
                names = ", ".join(f"{key} {value}" for key, value in each.descent.edges.items())
                yield f"{where}: best at the end of a grid ({names})"


def _where(regime: ProtocolRegime) -> str:
    return f"{regime.parameters} parameters, ratio {regime.ratio:g}"
