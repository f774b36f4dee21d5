"""The worst of several distances, of which one that is no number must not be lost."""

from __future__ import annotations

import math
from collections.abc import Iterable


def worst(distances: Iterable[float]) -> float:
    """The largest of them; infinite where one is not finite, 0.0 of none.

    `max` loses a NaN that is not the first, and what examines the result would pass.

    >>> worst([0.1, math.nan, 0.2]), worst([0.1, 0.3, 0.2]), worst([])
    (inf, 0.3, 0.0)
    """
    found = list(distances)
    return max(found, default=0.0) if all(map(math.isfinite, found)) else math.inf
