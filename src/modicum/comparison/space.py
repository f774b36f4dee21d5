"""What is searched on a side: its parameters, each with a range, and a default that comes first.

Ranges are written against a small protocol (`low`, `high` and `default`, or `values` and
`default`; `grid`, `widened`), so this file knows none of their classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Protocol, Self, runtime_checkable

from modicum.comparison.outcome import Settings
from modicum.core.errors import InputError

_DIGITS = 4  # significant ones of a value that was drawn: people read them
_EDGE = 1 / 8  # of a range's length: a best value so near to an end is at the edge


@runtime_checkable
class Searchable(Protocol):
    """A parameter's range or list of values, of whatever class."""

    @property
    def default(self) -> Any:
        """The value of the first trial."""

    def grid(self, n: int) -> Sequence[Any]:
        """`n` values that span the range, both ends among them; of a list all its values."""

    def widened(self, value: Any) -> Self:
        """The range continued beyond the end that is nearest to `value`; itself if it cannot be."""


@dataclass(frozen=True)
class Dimension:
    """A parameter as the engine sees it: a range in its own scale, or a list of values.

    Args:
        values: of a list; of a range it is empty.
    """

    default: Any
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False
    values: tuple[Any, ...] = ()

    @classmethod
    def of(cls, name: str, parameter: Searchable) -> Dimension:
        """What a parameter's object says of itself.

        Raises:
            InputError: it is no range, or its default lies outside of it.
        """
        default = parameter.default
        if values := tuple(getattr(parameter, "values", ())):
            if default not in values:
                raise InputError(
                    "the default is none of the values",
                    field=name,
                    value=default,
                    allowed=", ".join(map(str, values)),
                )
            return cls(default, values=values)
        low, high = getattr(parameter, "low", None), getattr(parameter, "high", None)
        if low is None or high is None or not low <= default <= high:
            raise InputError(
                "a range has low <= default <= high", field=name, value=(low, default, high)
            )
        log = getattr(parameter, "log", None)
        if log is None:  # the class alone knows: its grid's middle shows it
            middle = parameter.grid(3)[1]
            log = low > 0 and abs(middle - math.sqrt(low * high)) < abs(middle - (low + high) / 2)
        integer = all(isinstance(value, int) for value in (low, high, default))
        return cls(default, low, high, bool(log), integer)

    @property
    def size(self) -> float:
        """How many values there are; infinitely many in a range of real numbers."""
        if self.values:
            return len(self.values)
        if self.low == self.high:
            return 1
        return self.high - self.low + 1 if self.integer else math.inf

    def place(self, value: float) -> float:
        """Where a value lies in the range's scale, from 0 at the low end to 1 at the high one."""
        if self.high == self.low:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def at(self, place: float) -> Any:
        """The value at a place below 1 or at it, with a few digits, within the range."""
        if self.values:
            return self.values[min(int(place * len(self.values)), len(self.values) - 1)]
        if self.log:
            value = self.low * (self.high / self.low) ** place
        else:
            value = self.low + (self.high - self.low) * place
        return self.tidy(value)

    def tidy(self, value: float) -> float | int:
        """A drawn value as it is tried: rounded, and within the range."""
        if self.integer:
            return int(min(max(round(value), self.low), self.high))
        rounded = float(f"{value:.{_DIGITS}g}")
        return min(max(rounded, self.low), self.high)

    def to_json(self) -> dict[str, Any]:
        """The range as JSON values."""
        if self.values:
            return {"values": list(self.values), "default": self.default}
        found = {"low": self.low, "high": self.high, "default": self.default, "log": self.log}
        return found | {"integer": self.integer}


@dataclass(frozen=True)
class Side:
    """One of the methods that are compared.

    Args:
        name: what the report calls it.
        space: parameters that are tuned, by recipe path or name.
        fixed: what else the trial is called with, the same in each.
        refusal: why it cannot take part, in a sentence; it is then reported and not tried.

    >>> Side("plain", {}).defaults()
    {}
    """

    name: str
    space: Mapping[str, Searchable] = field(default_factory=dict)
    fixed: Settings = field(default_factory=dict)
    refusal: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("a side has a name", field="sides", value=self.name)
        if both := sorted(set(self.space) & set(self.fixed)):
            raise InputError(
                "this is tuned and fixed at once; leave it out of one of them",
                field=f"{self.name}.{both[0]}",
                value=self.fixed[both[0]],
            )
        _ = self.dimensions

    @property
    def dimensions(self) -> dict[str, Dimension]:
        """The space's parameters as the engine sees them."""
        return {name: Dimension.of(name, one) for name, one in self.space.items()}

    def defaults(self) -> dict[str, Any]:
        """The settings of the first trial, without the fixed ones."""
        return {name: one.default for name, one in self.dimensions.items()}

    @property
    def size(self) -> float:
        """How many different settings there are."""
        return math.prod((one.size for one in self.dimensions.values()), start=1)

    def points(self) -> list[dict[str, Any]]:
        """All settings of a space that is finite."""
        grids = [
            [one.default] if one.size == 1 else one.values or range(int(one.low), int(one.high) + 1)
            for one in self.dimensions.values()
        ]
        return [dict(zip(self.space, values, strict=True)) for values in product(*grids)]

    def edges(self, best: Settings, tried: Sequence[Settings]) -> dict[str, float]:
        """The parameters that are best at an end of their range, with that end.

        So is one whose best value lies in the last eighth of the range, with nothing tried further
        out.
        """
        found = {}
        for name, dimension in self.dimensions.items():
            if dimension.size <= 1 or dimension.values:
                continue
            place = dimension.place(best[name])
            places = [dimension.place(settings[name]) for settings in tried]
            if place <= _EDGE and place == min(places):
                found[name] = dimension.low
            elif place >= 1 - _EDGE and place == max(places):
                found[name] = dimension.high
        return found

    def widened(self, edges: Mapping[str, float]) -> Side:
        """The same side with these parameters' ranges continued beyond the end that is given.

        A range that knows of nothing beyond stays as it is.
        """
        wider = {name: self.space[name].widened(end) for name, end in edges.items()}
        return replace(self, space={**self.space, **wider})

    def to_json(self) -> dict[str, Any]:
        """What the side is, as JSON values."""
        space = {name: dimension.to_json() for name, dimension in self.dimensions.items()}
        # Why it is refused may be the free memory of a moment: no part of what is compared.
        refused = {"refused": True} if self.refusal else {}
        return {"space": space, "fixed": dict(self.fixed), **refused}
