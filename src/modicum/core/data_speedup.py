"""How many times as much data a reference needs for the losses that a method has.

D_eff = ((L - beta) / alpha)^(-1/B) is the data at which the reference's L(D) has the method's loss;
the speed-up is D_eff / D.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from modicum.core.errors import InputError
from modicum.core.intervals import t_interval
from modicum.core.scaling_fit import fit_data_law


@dataclass(frozen=True)
class DataSpeedup:
    """A method's speed-up at one amount of data.

    Args:
        data: D, tokens that it was trained on.
        effective: D_eff by the curve of the reference's mean losses.
        speedup: the geometric mean over seeds of D_eff / D; None where a loss is not finite, or a
            curve does not reach it, and `problem` says why.
        interval: of that mean at 95 %, by Student's t over the seeds' logarithms; None: one seed.
        by_seed: each seed's own, by the curve of the reference from the same seed.
        extrapolated: whether D_eff lies outside of the data that the reference was trained on.
    """

    data: float
    effective: float | None
    speedup: float | None
    interval: tuple[float, float] | None = None
    by_seed: tuple[float, ...] = ()
    extrapolated: bool = False
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self) | {
            "interval": None if self.interval is None else list(self.interval),
            "by_seed": list(self.by_seed),
        }


def data_speedups(
    reference: Mapping[float, Sequence[float]], method: Mapping[float, Sequence[float]]
) -> list[DataSpeedup]:
    """The speed-ups of a method over a reference, one for each amount of data.

    Args:
        reference: losses by seed for each amount of data, of at least four; L(D) is fitted to the
            losses of each seed, so what the curve is unsure of is in the interval too.
        method: the same, from the same seeds in the same order.

    Raises:
        InputError: there are fewer than four amounts of data, seeds differ in number, or the
            reference has a loss that is not finite, or none that falls with data.

    >>> tuned = {size: [40 * size**-0.4 + 1] for size in (1e5, 2e5, 4e5, 8e5)}
    >>> faster = {2e5: [40 * 2.6e5**-0.4 + 1]}
    >>> [round(one.speedup, 3) for one in data_speedups(tuned, faster)]
    [1.3]
    """
    counts = {len(losses) for losses in (*reference.values(), *method.values())}
    if len(counts) != 1 or counts == {0}:
        problem = "both sides have losses of the same seeds at every amount of data"
        raise InputError(problem, field="losses", value=sorted(counts))
    data, [seeds] = list(reference), counts
    mean = fit_data_law(data, [statistics.fmean(reference[size]) for size in data])
    curves = [fit_data_law(data, [reference[size][seed] for size in data]) for seed in range(seeds)]
    found = []
    for size, losses in method.items():
        if not all(map(math.isfinite, losses)):
            found.append(DataSpeedup(size, None, None, problem="a seed has no finite loss"))
            continue
        effective = mean.data(statistics.fmean(losses))
        each = [curve.data(loss) / size for curve, loss in zip(curves, losses, strict=True)]
        if not all(map(math.isfinite, (effective, *each))):
            problem = "a loss lies below the floor of the reference's curve"
            found.append(DataSpeedup(size, None, None, problem=problem))
            continue
        outside = not min(data) <= effective <= max(data)
        middle, interval = _over_seeds(each)
        found.append(DataSpeedup(size, effective, middle, interval, tuple(each), outside))
    return found


def _over_seeds(each: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """The geometric mean, and its interval."""
    logs = [math.log(one) for one in each]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None
    interval = t_interval(logs)
    assert interval is not None
    low, high = interval
    # Beyond any speed-up that means something there is no number either.
    return math.exp(mean), (math.exp(max(low, -700)), math.exp(min(high, 700)))


def crossings(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]
) -> list[float]:
    """Where in training two curves change ranks, as shares of it, before the end.

    Args:
        one, other: (share of training, loss), at the same shares, ascending.

    Raises:
        InputError: the shares differ.

    >>> crossings([(0.0, 4.0), (0.5, 2.0), (1.0, 1.5)], [(0.0, 4.0), (0.5, 2.5), (1.0, 1.4)])
    [0.9166666666666666]
    """
    if [share for share, _ in one] != [share for share, _ in other]:
        raise InputError("two curves are compared at the same shares of training", field="curves")
    gaps = [(share, mine - theirs) for (share, mine), (_, theirs) in zip(one, other, strict=True)]
    apart = [(share, gap) for share, gap in gaps if gap and math.isfinite(gap)]
    return [
        before + (share - before) * left / (left - gap)
        for (before, left), (share, gap) in pairwise(apart)
        if (left < 0) != (gap < 0)
    ]
