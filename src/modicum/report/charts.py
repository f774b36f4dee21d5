"""Which curves the page draws, and their points: few enough to draw, extremes never left out.

A column that is not named here has a chart too, named after it: what a task or a method writes is
drawn without a change here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from modicum.core.files import JsonObject
from modicum.report.columns import BY_CLASS, SKIPPED, StepColumns
from modicum.report.events import events
from modicum.report.facts import counted, unit
from modicum.report.folder import FolderContents, section
from modicum.report.numbers import as_count, number, per

if TYPE_CHECKING:
    from modicum.report.columns import Numbers, Places

STRETCHES = 1000  # of a curve; each shows its least and its greatest value, and has a mean
_UNITS = ("step", "tokens", "seconds")
_NO_CURVE = ("tokens", "seconds", "elapsed", SKIPPED)


@dataclass(frozen=True)
class Chart:
    """One chart: a column of the metrics, and of the evaluations where they have it too.

    Args:
        name: the column's.
        unit: of the values: "nats", "tokens/s", "bytes", or "" for a plain number.
        smooth: whether the metrics' values are noisy, and an average is drawn over them.
        zero: whether the axis begins at zero; so it does for amounts.
    """

    name: str
    title: str
    unit: str = ""
    note: str = ""
    smooth: bool = True
    zero: bool = False


CHARTS = (
    Chart("loss", "Loss", "nats", "nats per token"),
    Chart("tokens_per_second", "Speed", "tokens/s", "tokens/s", zero=True),
    Chart("bytes", "Memory of the process", "bytes", "resident size", smooth=False, zero=True),
    Chart("gradient_norm", "Gradient norm", "", "before clipping", zero=True),
    Chart("learning_rate", "Learning rate", "", "", smooth=False, zero=True),
)


def payload(
    runs: Sequence[FolderContents], low: float = -math.inf, high: float = math.inf
) -> dict[str, Any]:
    """All that the page's script draws, from one step to another."""
    drawn = [
        name
        for run in runs
        for table in (run.metrics, run.evaluations)
        for name in table.names
        if name != unit(run)  # a count, as tokens are
    ]
    return {
        "charts": [asdict(_of_unit(chart, runs)) for chart in charts(drawn)],
        "runs": [of_run(run, low, high) for run in runs],
    }


def charts(names: Iterable[str]) -> list[Chart]:
    """The charts of these columns: those that are known, then others in the order of the names."""
    found = dict.fromkeys(
        name for name in names if name not in _NO_CURVE and not name.startswith(f"{BY_CLASS}.")
    )
    known = [chart for chart in CHARTS if chart.name in found]
    others = [name for name in found if name not in {chart.name for chart in CHARTS}]
    return [*known, *(Chart(name, name.replace("_", " ").capitalize()) for name in others)]


def _of_unit(chart: Chart, runs: Sequence[FolderContents]) -> Chart:
    """The chart of a loss with what the runs' losses are means over."""
    if chart.name != "loss":
        return chart
    return replace(chart, note=", ".join(dict.fromkeys(per(unit(run)) for run in runs)))


def of_run(run: FolderContents, low: float = -math.inf, high: float = math.inf) -> dict[str, Any]:
    """One run's curves between two steps, its events, and the levels that it was to keep."""
    clock = _Clock(run.metrics)
    tables = [table for table in (run.metrics, run.evaluations) if table]
    return {
        "name": run.name,
        "unit": unit(run),
        "steps": as_count(run.metrics.steps[-1]) if run.metrics else 0,
        "start": clock.at(min(table.steps[0] for table in tables) if tables else 0),
        "end": clock.at(max(table.steps[-1] for table in tables) if tables else 0),
        "metrics": curves(run.metrics, clock, low, high),
        "evaluations": curves(run.evaluations, clock, low, high),
        "events": [event | clock.at(event["step"]) for event in events(run)],
        "levels": levels(run),
    }


def levels(run: FolderContents) -> dict[str, JsonObject]:
    """Lines across charts, by the chart's name: what was predicted, what the budget allows."""
    prediction = section(run.plans[-1], "prediction") if run.plans else {}
    found: dict[str, JsonObject] = {}
    if (speed := number(prediction.get("tokens_per_second"))) is not None:
        found["tokens_per_second"] = {"value": speed, "text": "predicted", "role": "measured"}
    peak = section(run.run, "peak_bytes")
    budget = number(peak.get("budget", prediction.get("budget_bytes")))
    if budget is not None and counted(run) == "process":
        found["bytes"] = {"value": budget, "text": "budget", "role": "budget"}
    return found


class _Clock:
    """How many tokens were trained and how many seconds passed by the end of each step."""

    def __init__(self, metrics: StepColumns) -> None:
        import numpy

        self._steps = numpy.array(metrics.steps)
        self._sums = {}
        for name in _UNITS[1:]:
            sums = numpy.concatenate([[0.0], metrics.running(name)])
            self._sums[name] = numpy.where(numpy.isfinite(sums), sums, 0.0)

    def at(self, step: float) -> JsonObject:
        """Step, tokens and seconds by a step's end."""
        return {name: values[0] for name, values in self.along([step]).items()}

    def along(self, steps: Sequence[float] | Numbers) -> dict[str, list[Any]]:
        """The same of several steps: a list of each."""
        places = self._steps.searchsorted(steps, side="right")
        tokens, seconds = (self._sums[name][places].tolist() for name in _UNITS[1:])
        return {
            "step": [as_count(float(step)) for step in steps],
            "tokens": [as_count(count) for count in tokens],
            "seconds": [round(passed, 3) for passed in seconds],
        }


def curves(
    columns: StepColumns, clock: _Clock, low: float = -math.inf, high: float = math.inf
) -> dict[str, Any]:
    """For each column its points from step `low` to `high`.

    A curve is `value` over `step`, `tokens` and `seconds`, lists of equal length. Of more than two
    points a stretch the least and the greatest remain; `mean` is then a curve of the stretches'
    means, and `every` says how many points a stretch has.
    """
    first, last = columns.between(low, high)
    # A point on each side, so that a line leaves what is looked at and does not end in it.
    first, last = max(first - 1, 0), last + 1
    found = {}
    for name in columns.names:
        if name in _NO_CURVE:
            continue
        places, values = columns.arrays(name, first, last)
        if len(values):
            found[name] = _curve(clock, columns.at(places), values)
    return found


def _curve(clock: _Clock, steps: Numbers, values: Numbers) -> dict[str, Any]:
    size = math.ceil(len(values) / STRETCHES)
    if size <= 2:
        return _points(clock, steps, values) | {"every": 1, "mean": None}
    kept, starts = extremes(values, size), range(0, len(values), size)
    middles = steps[[min(start + size // 2, len(steps) - 1) for start in starts]]
    return _points(clock, steps[kept], values[kept]) | {
        "every": size,
        "mean": _points(clock, middles, means(values, size)),
    }


def extremes(values: Numbers, size: int) -> Places:
    """Of each stretch of `size` values, where its least and its greatest are; first and last too.

    >>> import numpy
    >>> extremes(numpy.array([3.0, 1.0, 2.0, 5.0, 4.0, 4.5]), 3).tolist()
    [0, 1, 3, 4, 5]
    """
    import numpy

    whole = numpy.pad(values, (0, -len(values) % size), mode="edge").reshape(-1, size)
    starts = numpy.arange(len(whole)) * size
    ends = numpy.array([0, len(values) - 1])
    return numpy.unique(
        numpy.concatenate([starts + whole.argmin(1), starts + whole.argmax(1), ends])
    )


def means(values: Numbers, size: int) -> Numbers:
    """The mean of each stretch of `size` values, of which the last may be shorter.

    >>> import numpy
    >>> means(numpy.array([1.0, 3.0, 5.0]), 2).tolist()
    [2.0, 5.0]
    """
    import numpy

    starts = numpy.arange(0, len(values), size)
    counts = numpy.diff(numpy.append(starts, len(values)))
    # Divided first: the sum may be beyond what a float holds.
    return numpy.add.reduceat(values / counts.repeat(counts), starts)


def _points(clock: _Clock, steps: Numbers, values: Numbers) -> dict[str, Any]:
    return clock.along(steps) | {"value": values.tolist()}
