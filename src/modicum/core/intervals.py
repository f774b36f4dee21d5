"""Intervals of a mean difference, and tests of several at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from modicum.core.extras import library

LEVEL = 0.95
_RESAMPLES = 10_000
MeanInterval = tuple[float, float]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p values, in their order; None, where there is no test, is left out.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, place) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - rank)))
        adjusted[place] = least
    return adjusted


def t_interval(
    differences: Sequence[float], level: float = LEVEL, variance: float = 0.0
) -> MeanInterval | None:
    """The interval of a mean by Student's t; None for a single value.

    Args:
        variance: what the mean's has in addition to that over the values.

    >>> low, high = t_interval([0.0, 1.0, 2.0])
    >>> round(low, 3), round(high, 3)
    (-1.484, 3.484)
    """
    if len(differences) < 2:
        return None
    stats = library("scipy.stats", "tuning", "an interval")
    mean, error = statistics.fmean(differences), _error(differences, variance)
    half = float(stats.t.ppf((1 + level) / 2, len(differences) - 1)) * error
    return (mean - half, mean + half)


def p_value(differences: Sequence[float], variance: float = 0.0) -> float | None:
    """Of the t test that the mean is zero, on both sides; None for a single value."""
    if len(differences) < 2:
        return None
    mean, error = statistics.fmean(differences), _error(differences, variance)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    stats = library("scipy.stats", "tuning", "a test")
    return float(2 * stats.t.sf(abs(mean) / error, len(differences) - 1))


def _error(differences: Sequence[float], variance: float) -> float:
    return math.sqrt(statistics.variance(differences) / len(differences) + variance)


def bootstrap_interval(
    differences: Sequence[float], *, seed: int = 0, level: float = LEVEL
) -> MeanInterval | None:
    """The interval of a mean by percentiles of resamples; None for a single value.

    With few values it is too narrow (with five, about 85 % where 95 % is said).
    """
    if len(differences) < 2:
        return None
    numpy = library("numpy", "tuning", "a bootstrap")
    values = numpy.asarray(differences, dtype=float)
    drawn = numpy.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    means = values[drawn].mean(axis=1)
    low, high = numpy.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return (float(low), float(high))
