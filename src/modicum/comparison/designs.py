"""Settings that follow from a side's ranges and a seed alone: spread evenly, and on grids."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from modicum.comparison.space import Side

_LEVELS = 12  # of grids, each with twice as many steps
_SPREAD = 100  # settings at most


def spread(side: Side, seed: int, first: int) -> Iterator[dict[str, Any]]:
    """Settings spread evenly, by an additive recurrence from a place drawn from the seed.

    Args:
        first: the number of the first of them.

    Source: M. Roberts, "The unreasonable effectiveness of quasirandom sequences", 2018: the steps
    are powers of 1/g with g**(d + 1) = g + 1.
    """
    dimensions, g = side.dimensions, 2.0
    for _ in range(40):
        g = (1 + g) ** (1 / (len(dimensions) + 1))
    for number in range(first, first + _SPREAD):
        settings = {}
        for axis, (name, one) in enumerate(dimensions.items(), 1):
            start = derived(seed, f"spread/{axis}") / 2**32
            settings[name] = one.at((start + number / g**axis) % 1.0)
        yield settings


def grids(side: Side, seed: int) -> Iterator[dict[str, Any]]:
    """Grids of 3, 5, 9, ... values a range, each in an order drawn from the seed."""
    dimensions = side.dimensions
    for level in range(1, _LEVELS):
        axes = []
        for name, parameter in side.space.items():
            one = dimensions[name]
            drawn = [] if one.values else parameter.grid(2**level + 1)
            axes.append(one.values or [one.tidy(value) for value in drawn])
        points = [dict(zip(dimensions, values, strict=True)) for values in product(*axes)]
        random.Random(derived(seed, f"grid/{level}")).shuffle(points)
        yield from points


def derived(seed: int, name: str) -> int:
    """A 32-bit seed of this name."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little")
