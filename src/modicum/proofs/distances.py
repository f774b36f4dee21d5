"""The worst of several distances, of which one that is no number must not be lost."""

from __future__ import annotations

import math
from collections.abc import Iterable


def worst(distances: Iterable[float]) -> float:
    """The largest of them; infinite where one is not finite.

    `max` loses a NaN that is not the first, and what examines the result would pass.

    Raises:
        ValueError: there are none, so that nothing was compared.

    >>> worst([0.1, math.nan, 0.2]), worst([0.1, 0.3, 0.2])
    (inf, 0.3)
    """
    found = list(distances)
    return max(found) if all(map(math.isfinite, found)) else math.inf
