"""What several proofs train alike is trained once: losses and bytes by recipe, never times.

An entry is known by all that it depends on: the recipe, modicum's sources, versions, the machine.
So a figure from here is the one that training again would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from modicum.core.known_outcomes import described, known_outcome
from modicum.core.known_outcomes import sources_digest as sources

__all__ = ["described", "sources", "trained_once"]

T = TypeVar("T")


def trained_once(
    kind: type[T], recipe: Mapping[str, Any], train: Callable[[], T], *, fresh: bool = False
) -> tuple[T, bool]:
    """What training by a recipe ends with, and whether it was known.

    Args:
        kind: the dataclass of what it ends with: losses, counts and bytes.
        recipe: all that decides the outcome next to sources, versions and machine; each value is
            represented by its class and its `repr`.
        train: makes it where it is not known.
        fresh: make it in any case.
    """
    return known_outcome(kind, recipe, train, folder="baselines", sources=sources(), fresh=fresh)
