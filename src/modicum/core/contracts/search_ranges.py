"""The values that a field may be tuned over, each on its scale; see `search` for tables of them.

Every range has a `default`, gives a grid that contains it, a value for a number in [0, 1) (for
samplers), and a wider range where the best value lies at one of its ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

from modicum.core.errors import InputError

RangeEnd = Literal["low", "high"]
_ROUNDING = 1e-12
_DIGITS = 4  # significant ones of a grid's inner values, which people read


@dataclass(frozen=True)
class FieldBounds:
    """The least and the largest value that a field takes; None: there is none.

    Args:
        low_open, high_open: whether that value itself is not taken.
    """

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def at(self, end: RangeEnd) -> tuple[float | None, bool]:
        """The bound at an end, and whether it is open."""
        return (self.low, self.low_open) if end == "low" else (self.high, self.high_open)


@dataclass(frozen=True)
class NumberRange:
    """What ranges of numbers share; a subclass says on which scale its values lie."""

    low: float
    high: float
    default: float

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for name in ("low", "high", "default"):
            object.__setattr__(self, name, self._number(name, getattr(self, name)))
        if not self.low < self.high:
            raise InputError("must be below `high`", field="low", value=self.low)
        if not math.isfinite(self.high - self.low):
            raise InputError("too far above `low`", field="high", value=self.high)
        if not self.low <= self.default <= self.high:
            allowed = f"{self.low} to {self.high}"
            problem = "lies outside of the range"
            raise InputError(problem, field="default", value=self.default, allowed=allowed)

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError("expected a number", field=name, value=value)
        if not math.isfinite(value):
            raise InputError("must be a finite number", field=name, value=value)
        return float(value)

    @property
    def _multiplies(self) -> bool:
        """Whether steps of its scale multiply: it is logarithmic."""
        return False

    def _place(self, value: float) -> float:
        """Where a value lies on a scale of equal steps."""
        return value

    def _value(self, place: float) -> float:
        """The value at a place of that scale."""
        return place

    def clip(self, value: float) -> float:
        """The value of the range that is nearest."""
        return min(max(value, self.low), self.high)

    def edge(self, value: float) -> RangeEnd | None:
        """The end at which a value lies, or beyond which; None: inside."""
        return "low" if value <= self.low else "high" if value >= self.high else None

    def grid(self, count: int) -> tuple[float, ...]:
        """So many values, ascending: the default, then the farther end, then both, then between.

        Steps are nearly equal on the range's scale. Of integers there may be fewer.

        Raises:
            InputError: `count` is not positive.

        >>> LogRange(1e-4, 1e-1, 1e-3).grid(7)
        (0.0001, 0.0003162, 0.001, 0.003162, 0.01, 0.03162, 0.1)
        """
        below, above = self._steps(count)
        lower = self._between(self.low, self.default, below)
        upper = self._between(self.default, self.high, above)
        return (*lower[:-1], self.default, *upper[1:])

    def _steps(self, count: int) -> tuple[int, int]:
        """Steps of a grid below the default, and above it."""
        low, default, high = map(self._place, (self.low, self.default, self.high))
        share = (default - low) / (high - low) if low < high else 0.5
        if self.low < self.default < self.high:  # also where rounding moves it to an end
            share = min(max(share, _ROUNDING), 1 - _ROUNDING)
        return split_steps(count, share)

    def _between(self, first: float, last: float, steps: int) -> Sequence[float]:
        """Both ends and what lies between them in equal steps; nothing where there is no step."""
        if not steps:
            return ()
        start, width = self._place(first), self._place(last) - self._place(first)
        places = (start + width * step / steps for step in range(1, steps))
        inner = [min(max(self._value(place), first), last) for place in places]
        short = [first, *(float(f"{value:.{_DIGITS}g}") for value in inner), last]
        ascends = all(one < other for one, other in pairwise(short))
        return short if ascends else [first, *inner, last]

    def at(self, uniform: float) -> float:
        """The value for a number that is drawn uniformly from [0, 1): uniform on the scale.

        Raises:
            InputError: the number lies outside.

        >>> round(LogRange(1e-4, 1e-2, 1e-3).at(0.5), 6)
        0.001
        """
        check_uniform(uniform)
        low, high = self._place(self.low), self._place(self.high)
        return self.clip(self._value(low + uniform * (high - low)))

    def widened(
        self, value: float, within: FieldBounds | None = None, factor: float | None = None
    ) -> Self:
        """The range that goes farther where `value`, the best one found, lies at one of its ends.

        Inside it is the range itself. Towards an open bound the end goes half of the way.

        Args:
            within: what the field takes, as `MethodRecord.bounds` says it.
            factor: by which the end goes farther, in value on a logarithmic scale, in the range's
                width on a linear one; None: 4 and 2.

        Raises:
            InputError: the end is where the field's values end.

        >>> LogRange(1e-4, 1e-1, 1e-3).widened(1e-1).high
        0.4
        """
        factor = (4.0 if self._multiplies else 2.0) if factor is None else factor
        if not factor > 1:
            raise InputError("must be above 1", field="factor", value=factor)
        end = self.edge(value)
        if end is None:
            return self
        here, bound, is_open = getattr(self, end), *(within or FieldBounds()).at(end)
        there = self._beyond(end, factor)
        if bound is not None and ((there <= bound) if end == "low" else (there >= bound)):
            there = (here + bound) / 2 if is_open else bound
        if there == here or not math.isfinite(there):
            side = "below" if end == "low" else "above"
            problem = f"the best value lies at an end of the range, and nothing {side} is allowed"
            raise InputError(f"{problem}, so it cannot be widened", value=value)
        return replace(self, **{end: there})

    def _beyond(self, end: RangeEnd, factor: float) -> float:
        """Where an end goes, if nothing holds it."""
        if self._multiplies:
            return self.low / factor if end == "low" else self.high * factor
        width = self.high - self.low
        return self.high - factor * width if end == "low" else self.low + factor * width

    def as_json(self) -> dict[str, Any]:
        """The range as plain values."""
        return {"kind": self.kind, **{f.name: getattr(self, f.name) for f in fields(self)}}


@dataclass(frozen=True)
class LogRange(NumberRange):
    """Numbers from `low` to `high`, both above zero, on a logarithmic scale: learning rates.

    Raises:
        InputError: `low` is not above zero, not below `high`, or `default` lies outside.
    """

    kind: ClassVar[str] = "log"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low <= 0:
            problem = "a logarithmic scale has numbers above zero alone"
            raise InputError(problem, field="low", value=self.low)

    @property
    def _multiplies(self) -> bool:
        return True

    def _place(self, value: float) -> float:
        return math.log(value)

    def _value(self, place: float) -> float:
        return self.clip(math.exp(place))


@dataclass(frozen=True)
class LinearRange(NumberRange):
    """Numbers from `low` to `high`, in equal steps.

    Raises:
        InputError: `low` is not below `high`, or `default` lies outside.
    """

    kind: ClassVar[str] = "linear"


def check_uniform(number: float) -> None:
    """Refuse what is not drawn from [0, 1)."""
    if not 0 <= number < 1:
        raise InputError("expected a number of at least 0 and below 1", value=number)


def split_steps(count: int, share: float) -> tuple[int, int]:
    """Steps of a grid of `count` values below its default, and above it.

    Args:
        share: the part of the range that lies below the default; each part that there is has a step
            as soon as there are two.

    Raises:
        InputError: `count` is not positive.

    >>> split_steps(5, 0.3), split_steps(3, 0.01), split_steps(3, 0.0)
    ((1, 3), (1, 1), (0, 2))
    """
    if count < 1:
        raise InputError("expected a positive number of values", value=count)
    steps = count - 1
    below = round(steps * share)
    if 0 < share < 1 and steps > 1:
        below = min(max(below, 1), steps - 1)
    return below, steps - below
