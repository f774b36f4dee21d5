"""Ranges of integers, and choices among values that lie on no scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from modicum.core.contracts.search_ranges import (
    FieldBounds,
    NumberRange,
    RangeEnd,
    check_uniform,
)
from modicum.core.errors import InputError


@dataclass(frozen=True)
class IntegerRange(NumberRange):
    """Integers from `low` to `high`, which are all multiples of `step`.

    Args:
        log: whether steps are equal on a logarithmic scale: ranks.

    Raises:
        InputError: one of them is no integer or no multiple; `low` is not below `high`, or on a
            logarithmic scale not positive; `default` lies outside.

    >>> IntegerRange(1, 64, 8, log=True).grid(7)
    (1, 2, 4, 8, 16, 32, 64)
    """

    low: int
    high: int
    default: int
    log: bool = False
    step: int = 1

    kind: ClassVar[str] = "integer"

    def __post_init__(self) -> None:
        log: object = self.log
        if not isinstance(log, bool):
            raise InputError("expected true or false", field="log", value=log)
        step: object = self.step
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise InputError("expected a positive integer", field="step", value=step)
        super().__post_init__()
        if self.log and self.low < 1:
            problem = "a logarithmic scale has numbers above zero alone"
            raise InputError(problem, field="low", value=self.low)

    def _number(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError("expected an integer", field=name, value=value)
        if value % self.step:
            raise InputError(f"must be a multiple of {self.step}", field=name, value=value)
        return value

    @property
    def _multiplies(self) -> bool:
        return self.log

    def _place(self, value: float) -> float:
        return math.log(value) if self.log else value

    def _value(self, place: float) -> float:
        return math.exp(place) if self.log else place

    def _count(self, value: float) -> int:
        """A value in units of the step."""
        return round(value / self.step)

    def clip(self, value: float) -> int:
        """The value of the range that is nearest."""
        return self.step * self._count(super().clip(value))

    def grid(self, count: int) -> tuple[int, ...]:
        """As many values, or all if there are fewer: see `NumberRange.grid`.

        Raises:
            InputError: `count` is not positive.
        """
        return tuple(int(value) for value in super().grid(count))

    def _steps(self, count: int) -> tuple[int, int]:
        below, above = super()._steps(count)
        steps = below + above
        low, default, high = map(self._count, (self.low, self.default, self.high))
        # No more steps on a side than there are integers; the other side takes what is left over.
        below = min(below, default - low)
        above = min(steps - below, high - default)
        return min(steps - above, default - low), above

    def _between(self, first: float, last: float, steps: int) -> Sequence[float]:
        if not steps:
            return ()
        start, width = self._place(first), self._place(last) - self._place(first)
        counts = [
            self._count(first),
            *(self._count(self._value(start + width * k / steps)) for k in range(1, steps)),
            self._count(last),
        ]
        for index in range(1, steps):
            counts[index] = max(counts[index], counts[index - 1] + 1)
        for index in range(steps - 1, 0, -1):
            counts[index] = min(counts[index], counts[index + 1] - 1)
        return [self.step * each for each in counts]

    def at(self, uniform: float) -> int:
        """The value for a number that is drawn uniformly from [0, 1); see `NumberRange.at`.

        Raises:
            InputError: the number lies outside.
        """
        check_uniform(uniform)
        # Each integer has the part of the scale that is nearest to it.
        low, high = self.low - self.step / 2, self.high + self.step / 2
        start, width = self._place(low), self._place(high) - self._place(low)
        return self.clip(self._value(start + uniform * width))

    def widened(
        self, value: float, within: FieldBounds | None = None, factor: float | None = None
    ) -> Self:
        """The range that goes farther where the best value found lies at one of its ends.

        Raises:
            InputError: the end is where the field's values end.
        """
        return super().widened(value, self._closed(within or FieldBounds()), factor)

    def _closed(self, bounds: FieldBounds) -> FieldBounds:
        """The first and the last multiple of the step within bounds."""
        (low, low_open), (high, high_open) = bounds.at("low"), bounds.at("high")
        step = self.step
        if low is not None:
            low = step * (math.floor(low / step) + 1 if low_open else math.ceil(low / step))
        if high is not None:
            high = step * (math.ceil(high / step) - 1 if high_open else math.floor(high / step))
        return FieldBounds(max(step, low or step) if self.log else low, high)

    def _beyond(self, end: RangeEnd, factor: float) -> int:
        count = super()._beyond(end, factor) / self.step
        return self.step * (math.floor(count) if end == "low" else math.ceil(count))


@dataclass(frozen=True)
class SearchChoice:
    """One of several values: words, or numbers of which only these make sense.

    Args:
        values: at least two, plain and different; numbers ascend.

    Raises:
        InputError: they are not, or `default` is none of them.

    >>> SearchChoice((2, 4, 8), 4).grid(2), SearchChoice(("rand", "snip"), "rand").at(0.7)
    ((4, 8), 'snip')
    """

    values: tuple[Any, ...]
    default: Any

    kind: ClassVar[str] = "choice"

    def __post_init__(self) -> None:
        given: object = self.values
        if not isinstance(given, tuple) or len(given) < 2:
            problem = "expected a tuple of two values or more"
            raise InputError(problem, field="values", value=given)
        for index, value in enumerate(self.values):
            if not _plain(value):
                problem = "is no plain value (text, number, true, false, null, or a tuple of such)"
                raise InputError(problem, field="values", value=value)
            if any(_same(value, other) for other in self.values[:index]):
                raise InputError("is there twice", field="values", value=value)
        if self._numbers and list(self.values) != sorted(self.values):
            raise InputError("numbers must ascend", field="values", value=self.values)
        self._index(self.default, "default")

    @property
    def _numbers(self) -> bool:
        return all(_number(value) for value in self.values)

    def _index(self, value: Any, field: str | None = None) -> int:
        for index, known in enumerate(self.values):
            if _same(known, value):
                return index
        allowed = ", ".join(map(repr, self.values))
        raise InputError("is none of the values", field=field, value=value, allowed=allowed)

    def clip(self, value: Any) -> Any:
        """The value itself; of numbers the nearest one.

        Raises:
            InputError: it is none of the values, which are not all numbers.
        """
        if self._numbers and _number(value):
            return min(self.values, key=lambda known: abs(known - value))
        return self.values[self._index(value)]

    def edge(self, value: Any) -> RangeEnd | None:
        """The end at which a number lies; None: inside, or the values are no numbers."""
        if not (self._numbers and _number(value)):
            return None
        return "low" if value <= self.values[0] else "high" if value >= self.values[-1] else None

    def grid(self, count: int) -> tuple[Any, ...]:
        """So many of the values in their order, the default among them, or all if there are fewer.

        Raises:
            InputError: `count` is not positive.
        """
        last = len(self.values) - 1
        places = IntegerRange(0, last, self._index(self.default)).grid(count)
        return tuple(self.values[place] for place in places)

    def at(self, uniform: float) -> Any:
        """The value for a number that is drawn uniformly from [0, 1).

        Raises:
            InputError: the number lies outside.
        """
        check_uniform(uniform)
        return self.values[int(uniform * len(self.values))]

    def widened(
        self, value: Any, within: FieldBounds | None = None, factor: float | None = None
    ) -> Self:
        """The choice itself, as long as the best value is not at an end of numbers.

        Raises:
            InputError: it is.
        """
        if self.edge(value) is not None:
            problem = "the best value is at an end of a choice, which has no others"
            raise InputError(f"{problem}, so it cannot be widened", value=value)
        return self

    def as_json(self) -> dict[str, Any]:
        """The choice as plain values."""
        return {"kind": self.kind, "values": list(self.values), "default": self.default}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    finite = not isinstance(value, float) or math.isfinite(value)
    return value is None or (isinstance(value, str | int | float) and finite)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
