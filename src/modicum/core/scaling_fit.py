"""Fits of what training depends on: L(D) of the amount of data, h(N, R) of size and data ratio.

SciPy and NumPy come with the extra `tuning`; nothing here imports torch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from modicum.core.errors import InputError
from modicum.core.extras import library

LEAST_DATA = 4  # L(D) has three unknowns: with three sizes it goes through any losses
LEAST_REGIMES = 6  # h(N, R) has four, and one regime is held out
PURPOSE = "a fit"
_EXPONENTS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.65, 0.9, 1.2, 1.6, 2.2, 3.0)  # starts for B
_SIGNED = (-1.5, -1.0, -0.5, -0.2, 0.0, 0.2, 0.5, 1.0, 1.5)  # starts for b and for c
_STEEPEST = 4.0
_TIGHT = 1e-15


@dataclass(frozen=True)
class DataLaw:
    """L(D) = alpha D^-B + beta: a loss in nats, D tokens.

    >>> law = DataLaw(alpha=100.0, exponent=0.5, floor=1.0)
    >>> law.loss(10_000), law.data(2.0)
    (2.0, 10000.0)
    """

    alpha: float
    exponent: float
    floor: float

    def loss(self, data: float) -> float:
        """The loss after so many tokens."""
        return self.alpha * float(data) ** -self.exponent + self.floor

    def data(self, loss: float) -> float:
        """D_eff, the tokens that it takes to this loss; infinite at the floor and below it."""
        if loss <= self.floor:
            return math.inf
        return float(((loss - self.floor) / self.alpha) ** (-1 / self.exponent))


@dataclass(frozen=True)
class RegimeLaw:
    """h(N, R) = A N^b R^c + d: a hyper-parameter's best value by size and data ratio.

    >>> law = RegimeLaw(factor=2.0, by_parameters=-0.5, by_ratio=0.0, offset=0.1)
    >>> round(law.value(10_000, 4.0), 6)
    0.12
    """

    factor: float
    by_parameters: float
    by_ratio: float
    offset: float

    def value(self, parameters: float, ratio: float) -> float:
        """The best value that it predicts for a model of N parameters at a data ratio R."""
        scale = float(parameters) ** self.by_parameters * float(ratio) ** self.by_ratio
        return self.factor * scale + self.offset


@dataclass(frozen=True)
class HeldOutFit:
    """A law that was fitted without the last regime, and what was found there."""

    law: RegimeLaw
    predicted: float
    found: float


def fit_data_law(data: Sequence[float], losses: Sequence[float]) -> DataLaw:
    """Fit L(D) = alpha D^-B + beta by least squares, with alpha and B above zero, beta not below.

    Args:
        data: tokens, of at least four sizes.
        losses: of each; all finite.

    Raises:
        InputError: there are fewer sizes, a number is not finite or a size not positive, or more
            data has no lower loss; or SciPy is not installed.

    Source: Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them", arXiv 2509.02046,
    which has three sizes; through three points the curve always goes.

    >>> sizes = [1e5, 2e5, 4e5, 8e5]
    >>> law = fit_data_law(sizes, [DataLaw(50.0, 0.4, 1.2).loss(size) for size in sizes])
    >>> round(law.exponent, 4), round(law.floor, 4)
    (0.4, 1.2)
    """
    points = sorted(zip(_positive("data", data), _finite("losses", losses), strict=True))
    if len({size for size, _ in points}) < LEAST_DATA:
        problem = "L(D) has three unknowns, so its fit needs four sizes of data"
        raise InputError(problem, field="data", value=list(data), allowed="four or more")
    if points[-1][1] >= points[0][1]:
        problem = "more data has no lower loss, so no L(D) = alpha D^-B + beta fits"
        raise InputError(problem, field="losses", value=[loss for _, loss in points])
    unit = _middle([size for size, _ in points])
    x, y = _arrays([size / unit for size, _ in points], [loss for _, loss in points])
    starts = [(x**-b, (b,)) for b in _EXPONENTS]
    alpha, exponent, floor = _fitted(
        lambda x, a, b, floor: a * x**-b + floor,
        x,
        y,
        _start(starts, y, floor=0.0),
        ([1e-12, 1e-3, 0.0], [math.inf, 2 * _STEEPEST, math.inf]),
    )
    return DataLaw(alpha * unit**exponent, exponent, floor)


def fit_regime_law(points: Sequence[tuple[float, float, float]]) -> RegimeLaw:
    """Fit h(N, R) = A N^b R^c + d by least squares, with A not below zero.

    Args:
        points: (N, R, best value), of at least five regimes.

    Raises:
        InputError: there are fewer, or a number is not finite or not positive; or SciPy is not
            installed.

    Source: as of `fit_data_law`, phase III.
    """
    sizes = _positive("parameters", [n for n, _, _ in points])
    ratios = _positive("ratio", [r for _, r, _ in points])
    found = _finite("values", [value for _, _, value in points])
    if len(set(zip(sizes, ratios, strict=True))) < LEAST_REGIMES - 1:
        problem = "h(N, R) has four unknowns, so its fit needs five regimes"
        raise InputError(problem, field="points", value=len(points), allowed="five or more")
    if min(found) == max(found):
        return RegimeLaw(found[0], 0.0, 0.0, 0.0)
    size, ratio = _middle(sizes), _middle(ratios)
    n, r, y = _arrays([each / size for each in sizes], [each / ratio for each in ratios], found)
    starts = [(n**b * r**c, (b, c)) for b, c in product(_SIGNED, repeat=2) if b or c]
    a, b, c, offset = _fitted(
        lambda x, a, b, c, offset: a * x[0] ** b * x[1] ** c + offset,
        (n, r),
        y,
        _start(starts, y, floor=-math.inf),
        ([0.0, -_STEEPEST, -_STEEPEST, -math.inf], [math.inf, _STEEPEST, _STEEPEST, math.inf]),
    )
    return RegimeLaw(a * size**-b * ratio**-c, b, c, offset)


def held_out_fit(points: Sequence[tuple[float, float, float]]) -> HeldOutFit:
    """Fit all regimes but the last, and predict that one: see `fit_regime_law`.

    Raises:
        InputError: there are fewer than six regimes; else as `fit_regime_law`.
    """
    *known, (parameters, ratio, found) = points
    law = fit_regime_law(known)
    return HeldOutFit(law, law.value(parameters, ratio), found)


def _positive(field: str, values: Sequence[float]) -> list[float]:
    for value in values:
        if not (math.isfinite(value) and value > 0):
            raise InputError("expected positive finite numbers", field=field, value=value)
    return list(map(float, values))


def _finite(field: str, values: Sequence[float]) -> list[float]:
    for value in values:
        if not math.isfinite(value):
            raise InputError("expected finite numbers", field=field, value=value)
    return list(map(float, values))


def _middle(values: Sequence[float]) -> float:
    """The geometric mean: in units of it a fit's numbers are near 1."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _arrays(*lists: Sequence[float]) -> list[Any]:
    numpy = library("numpy", "tuning", PURPOSE)
    return [numpy.asarray(values, dtype=float) for values in lists]


def _start(
    shapes: Sequence[tuple[Any, tuple[float, ...]]], y: Any, *, floor: float
) -> tuple[float, ...]:
    """(factor, exponents, offset) of the shape whose linear least squares leave least."""
    numpy = library("numpy", "tuning", PURPOSE)
    best, least = (1.0, *shapes[0][1], 0.0), math.inf
    for shape, exponents in shapes:
        columns = numpy.stack([shape, numpy.ones_like(shape)], axis=1)
        factor, offset = numpy.linalg.lstsq(columns, y, rcond=None)[0]
        offset = max(offset, floor)
        factor = max(float(shape @ (y - offset) / (shape @ shape)), 1e-9)
        left = float(((factor * shape + offset - y) ** 2).sum())
        if left < least:
            best, least = (factor, *exponents, float(offset)), left
    return best


def _fitted(
    law: Callable[..., Any],
    x: Any,
    y: Any,
    start: tuple[float, ...],
    bounds: tuple[list[float], list[float]],
) -> tuple[float, ...]:
    """The law's numbers by SciPy's `curve_fit`, from a start that is near."""
    optimize = library("scipy.optimize", "tuning", PURPOSE)
    tight = {"xtol": _TIGHT, "ftol": _TIGHT, "gtol": _TIGHT, "max_nfev": 20_000}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the covariance, which nothing reads
        try:
            found, _ = optimize.curve_fit(law, x, y, p0=start, bounds=bounds, **tight)
        except RuntimeError:  # not at the last digit after many steps: the start is near already
            return start
    return tuple(map(float, found))
