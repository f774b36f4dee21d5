"""Ranges for whoever has none of their own: trials that are formulas, benchmarks, a few lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TrialRange:
    """Numbers from `low` to `high`, in a linear or a logarithmic scale.

    Args:
        bounds: beyond which it is never widened.

    >>> TrialRange(1e-4, 1e-2, 1e-3).widened(1e-2).high
    0.1
    """

    low: float
    high: float
    default: float
    log: bool = True
    bounds: tuple[float, float] = (-math.inf, math.inf)

    def grid(self, n: int) -> Sequence[float]:
        """`n` values in equal steps of the scale, both ends among them."""
        if n == 1 or self.low == self.high:
            return [self.default]
        places = [i / (n - 1) for i in range(n)]
        if self.log:
            return [self.low * (self.high / self.low) ** place for place in places]
        return [self.low + (self.high - self.low) * place for place in places]

    def widened(self, value: float) -> TrialRange:
        """Continued beyond the end that is nearest to `value`: by half its length."""
        upper = abs(value - self.high) < abs(value - self.low)
        if self.log:
            step = math.sqrt(self.high / self.low)
            low, high = self.low / step, self.high * step
        else:
            step = (self.high - self.low) / 2
            low, high = self.low - step, self.high + step
        if upper:
            return replace(self, high=min(high, self.bounds[1]))
        return replace(self, low=max(low, self.bounds[0]))


@dataclass(frozen=True)
class OneOf:
    """Values from a list.

    >>> OneOf(("cosine", "linear"), "linear").grid(1)
    ('cosine', 'linear')
    """

    values: tuple[Any, ...]
    default: Any

    def grid(self, n: int) -> Sequence[Any]:
        """All values, however many are asked for."""
        return self.values

    def widened(self, value: Any) -> OneOf:
        """Itself: a list has no edge."""
        return self
