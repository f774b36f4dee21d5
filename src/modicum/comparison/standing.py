"""One side over the seeds: its losses, their mean, or why there is none."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modicum.comparison.outcome import Outcome


@dataclass(frozen=True)
class Standing:
    """One side over the seeds.

    Args:
        losses: of each seed in order; +inf where it diverged, None where there is none.
        mean: None unless every seed has a finite loss.
        deviation: the standard deviation over seeds.
        problem: why there is no mean, in words.
    """

    side: str
    losses: tuple[float | None, ...]
    mean: float | None
    deviation: float | None
    problem: str = ""


def standing(
    side: str, by_seed: Mapping[int, Outcome], seeds: Sequence[int], figure: str
) -> Standing:
    """The side on one figure, by its outcomes of these seeds."""
    losses = tuple(by_seed[s].figure(figure) if s in by_seed else None for s in seeds)
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if seeds and len(finite) == len(seeds):
        deviation = statistics.stdev(finite) if len(finite) > 1 else None
        return Standing(side, losses, statistics.fmean(finite), deviation)
    counts = Counter(
        "has no figure" if by_seed[s].status == "finished" else by_seed[s].status
        for s, loss in zip(seeds, losses, strict=True)
        if s in by_seed and loss is None
    )
    counts["diverged"] += sum(loss == math.inf for loss in losses)
    counts["was not run"] += sum(s not in by_seed for s in seeds)
    words = [
        f"{status.replace('_', ' ')} in {count} of {len(seeds)} seeds"
        for status, count in sorted(counts.items())
        if count
    ]
    return Standing(side, losses, None, None, ", ".join(words) or "was not run")
