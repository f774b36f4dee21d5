"""The numbers of a file with one JSON object a step, kept column by column.

A million rows are a hundred megabytes so, and a gigabyte as dicts.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from modicum.core.files import JsonObject
from modicum.report.numbers import number

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.float64]
    Places = NDArray[numpy.intp]

SKIPPED = "skipped"
BY_CLASS = "by_class"
_LARGEST = 64  # columns that are kept: a damaged file may name another one in each row


class StepColumns:
    """Rows in order of their step, each step once: what was written last counts.

    Values that are no finite number are NaN in a column. The loss of an update that was skipped is
    none, and its `skipped` is 1.

    >>> columns = StepColumns([{"step": 2, "loss": 3.0}, {"step": 1, "loss": 4.0, "text": "x"}])
    >>> columns.points("loss")
    ([0, 1], [4.0, 3.0])
    """

    def __init__(self, rows: Iterable[JsonObject] = ()) -> None:
        self.steps = array("d")
        self._columns: dict[str, array[float]] = {}
        self.extend(rows)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        """The columns that hold a number, in the order in which they came."""
        return list(self._columns)

    def extend(self, rows: Iterable[JsonObject]) -> None:
        """Take in more rows."""
        before, rows = len(self), list(rows)
        if not self._took_at_once(rows):
            for row in rows:
                self._append(row)
        behind = range(max(before - 1, 0), len(self))
        if any(self.steps[first] >= self.steps[second] for first, second in pairwise(behind)):
            self._sort()

    def _took_at_once(self, rows: Sequence[JsonObject]) -> bool:
        """Take in rows of the same names and of finite numbers alone; False: these are others.

        Most rows of a run are such, and it takes a third of the time so.
        """
        import numpy

        names = rows[0].keys() if rows else set()
        if "step" not in names or len(names | self._columns.keys()) > _LARGEST:
            return False
        if names & {SKIPPED, BY_CLASS} or any(row.keys() != names for row in rows):
            return False
        columns = {name: [row[name] for row in rows] for name in names}
        if not all(set(map(type, values)) <= {int, float} for values in columns.values()):
            return False
        try:
            found = {name: array("d", values) for name, values in columns.items()}
        except OverflowError:  # an integer of hundreds of digits
            return False
        if not all(numpy.isfinite(values).all() for values in found.values()):
            return False
        count = len(self)
        self.steps.extend(found.pop("step"))
        for name, values in found.items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([math.nan] * (count - len(column)))
            column.extend(values)
        return True

    def _append(self, row: JsonObject) -> None:
        step = number(row.get("step"))
        if step is None:
            return
        count, skipped = len(self.steps), bool(row.get(SKIPPED))
        self.steps.append(step)
        for name, value in _flat(row):
            known = number(value)
            if known is None or name == "step" or (skipped and name == "loss"):
                continue
            self._put(name, count, known)
        if skipped:
            self._put(SKIPPED, count, 1.0)

    def _put(self, name: str, place: int, value: float) -> None:
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= _LARGEST:
                return
            column = self._columns[name] = array("d")
        if (missing := place - len(column)) < 0:
            return  # a class and a metric of one name
        if missing:
            column.extend([math.nan] * missing)
        try:
            column.append(value)
        except OverflowError:  # an integer of thousands of digits
            column.append(math.nan)

    def _sort(self) -> None:
        latest = {step: place for place, step in enumerate(self.steps)}
        order = [latest[step] for step in sorted(latest)]
        self._columns = {
            name: array(
                "d", (column[place] if place < len(column) else math.nan for place in order)
            )
            for name, column in self._columns.items()
        }
        self.steps = array("d", (self.steps[place] for place in order))

    def points(self, name: str, first: int = 0, last: int | None = None) -> Points:
        """`arrays` as lists."""
        places, values = self.arrays(name, first, last)
        return places.tolist(), values.tolist()

    def arrays(self, name: str, first: int = 0, last: int | None = None) -> tuple[Places, Numbers]:
        """The places of a column's finite values among the rows `first` to `last`, and the values.

        With `last` None: to the end.
        """
        import numpy

        values = self._copied(name, first, last)
        known = ~numpy.isnan(values)
        return numpy.flatnonzero(known) + first, values[known]

    def at(self, places: Places) -> Numbers:
        """The steps of rows."""
        import numpy

        return numpy.array(self.steps)[places]

    def _copied(self, name: str, first: int = 0, last: int | None = None) -> Numbers:
        """A copy of a column, which keeps the column itself free to grow."""
        import numpy

        return numpy.array(self._columns.get(name, array("d"))[first:last], dtype=numpy.float64)

    def values(self, name: str) -> list[float]:
        """A column's finite values."""
        return self.points(name)[1]

    def total(self, name: str) -> float | None:
        """The sum of a column; None: it holds nothing."""
        values = self.arrays(name)[1]
        return float(values.sum()) if len(values) else None

    def greatest(self, name: str) -> float | None:
        """The largest value of a column; None: it holds nothing."""
        values = self.arrays(name)[1]
        return float(values.max()) if len(values) else None

    def last(self, name: str) -> float | None:
        """The value at the last step; None where that has none."""
        column = self._columns.get(name, array("d"))
        value = column[-1] if len(column) == len(self) and column else math.nan
        return None if math.isnan(value) else value

    def row(self, step: float) -> dict[str, float]:
        """The finite values at a step; none where there is no such step."""
        first, last = self.between(step, step)
        return {name: value for name in self.names for value in self.points(name, first, last)[1]}

    def running(self, name: str) -> Numbers:
        """The sum of a column up to each row, that row's among it."""
        import numpy

        amounts = numpy.zeros(len(self))
        places, values = self.arrays(name)
        amounts[places] = values
        with numpy.errstate(over="ignore", invalid="ignore"):
            return amounts.cumsum()

    def between(self, low: float, high: float) -> tuple[int, int]:
        """The rows of the steps from `low` to `high`, as a slice."""
        return bisect_left(self.steps, low), bisect_right(self.steps, high)


Points = tuple[list[int], list[float]]


def _flat(row: JsonObject) -> Iterator[tuple[str, object]]:
    """Names and values; of the numbers by class, each under a name of its own."""
    for name, value in row.items():
        if name == BY_CLASS and isinstance(value, dict):
            yield from ((f"{BY_CLASS}.{each}", number) for each, number in value.items())
        else:
            yield name, value
