"""A hyper-parameter's grid: values on a scale, one of them the default, and what is beyond."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, Self

from modicum.core.errors import InputError

GridScale = Literal["log", "linear", "list"]
_DIGITS = 4  # significant ones of a value beyond an end: people read them


class GridSource(Protocol):
    """A range, of whatever class, that gives a grid of its values."""

    @property
    def default(self) -> Any:
        """The value of the first trial."""

    def grid(self, count: int, /) -> Sequence[Any]:
        """So many values that span the range; of a list as many of its values."""


@dataclass(frozen=True)
class SearchGrid:
    """The values that a hyper-parameter is tried at.

    Args:
        values: different; numbers ascend.
        default: one of them, where the search begins.
        scale: how values beyond an end follow: by the ratio of the last two, by their difference,
            or not at all.
        least, most: what the hyper-parameter takes, both ends included; None: anything.

    Raises:
        InputError: no value, a default that is none of them, numbers that do not ascend or lie
            beyond what is allowed, or a scale that they do not fit.

    >>> SearchGrid((0.001, 0.004), 0.004, "log").extended(0.004).values
    (0.001, 0.004, 0.016)
    """

    values: tuple[Any, ...]
    default: Any
    scale: GridScale = "list"
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise InputError("a grid has one value at least", field="values", value=self.values)
        if self.default not in self.values:
            allowed = ", ".join(map(str, self.values))
            problem = "the default is none of the grid's values"
            raise InputError(problem, field="default", value=self.default, allowed=allowed)
        if self.scale == "list":
            if any(value in self.values[:place] for place, value in enumerate(self.values)):
                raise InputError("is there twice", field="values", value=self.values)
            return
        if not all(map(_is_number, self.values)):
            problem = f"a grid on the scale {self.scale!r} has finite numbers alone"
            raise InputError(problem, field="values", value=self.values)
        if any(one >= other for one, other in pairwise(self.values)):
            raise InputError("numbers must ascend", field="values", value=self.values)
        if self.scale == "log" and self.values[0] <= 0:
            problem = "a logarithmic scale has numbers above zero alone"
            raise InputError(problem, field="values", value=self.values[0])
        low, high = self._limits
        for value in self.values:
            if not low <= value <= high:
                allowed = f"{low} to {high}"
                raise InputError("lies outside", field="values", value=value, allowed=allowed)

    @classmethod
    def of(
        cls,
        source: GridSource,
        count: int = 5,
        *,
        least: float | None = None,
        most: float | None = None,
    ) -> Self:
        """The grid of a range: its scale is the one on which its values are at equal steps.

        Args:
            count: values, the default among them.

        Raises:
            InputError: the range gives values that are no grid.
        """
        values = tuple(source.grid(count))
        if source.default not in values:
            values = tuple(sorted((*values, source.default)))
        return cls(values, source.default, _scale_of(source, values), least, most)

    @property
    def _limits(self) -> tuple[float, float]:
        low = -math.inf if self.least is None else self.least
        return low, math.inf if self.most is None else self.most

    def extended(self, value: Any) -> Self | None:
        """The grid with one more value beyond the end at which `value` lies.

        None: it lies inside, or nothing is beyond.
        """
        if self.scale == "list" or len(self.values) < 2:
            return None
        found = None
        if value == self.values[0]:
            found = self._beyond(self.values[0], self.values[1])
            values = (found, *self.values)
        elif value == self.values[-1]:
            found = self._beyond(self.values[-1], self.values[-2])
            values = (*self.values, found)
        return None if found is None else replace(self, values=values)

    def _beyond(self, end: float, inner: float) -> float | int | None:
        low, high = self._limits
        there = end * (end / inner) if self.scale == "log" else end + (end - inner)
        integer = all(isinstance(value, int) for value in self.values)
        there = round(there) if integer else float(f"{there:.{_DIGITS}g}")
        there = min(max(there, low), high)
        if there == end or not math.isfinite(there) or (self.scale == "log" and there <= 0):
            return None
        return int(there) if integer else there

    def fixed(self, value: Any) -> SearchGrid:
        """A grid of this value alone."""
        return SearchGrid((value,), value)

    def begun_at(self, value: Any) -> Self:
        """The same grid, begun at another of its values.

        Raises:
            InputError: it is none of them.
        """
        return replace(self, default=value)

    def to_json(self) -> dict[str, Any]:
        """The grid as JSON values."""
        found = {"values": list(self.values), "default": self.default, "scale": self.scale}
        return found | {"least": self.least, "most": self.most}


def _is_number(value: Any) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and math.isfinite(value)


def _scale_of(source: GridSource, values: Sequence[Any]) -> GridScale:
    """Of a list none; else the scale on which the middle of the range's own three values is."""
    if getattr(source, "values", None) is not None or not all(map(_is_number, values)):
        return "list"
    if len(values) < 3:
        return "log" if values[0] > 0 else "linear"
    if values[0] <= 0:
        return "linear"
    steps = [later - before for before, later in pairwise(values)]
    ratios = [math.log(later / before) for before, later in pairwise(values)]
    return "log" if max(ratios) / min(ratios) < max(steps) / min(steps) else "linear"
