"""Which curves the page draws, and their points: few enough to draw, extremes never left out.

A column that is not named here has a chart too, named after it: what a task or a method writes is
drawn without a change here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from modicum.core.files import JsonObject
from modicum.report.columns import BY_CLASS, SKIPPED, StepColumns
from modicum.report.events import events
from modicum.report.facts import counted, unit
from modicum.report.folder import FolderContents, section
from modicum.report.numbers import as_count, number, per

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
        self._steps = metrics.steps
        self._sums = {name: metrics.running(name) for name in _UNITS[1:]}

    def at(self, step: float) -> JsonObject:
        """Step, tokens and seconds by a step's end."""
        place = bisect_right(self._steps, step) - 1
        sums = {name: sums[place] if place >= 0 else 0.0 for name, sums in self._sums.items()}
        return {
            "step": as_count(step),
            "tokens": as_count(sums["tokens"]) if math.isfinite(sums["tokens"]) else 0,
            "seconds": round(sums["seconds"], 3) if math.isfinite(sums["seconds"]) else 0,
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
        places, values = columns.points(name, first, last)
        if values:
            found[name] = _curve(columns, clock, places, values)
    return found


def _curve(
    columns: StepColumns, clock: _Clock, places: list[int], values: list[float]
) -> dict[str, Any]:
    size = math.ceil(len(values) / STRETCHES)
    steps = [columns.steps[place] for place in places]
    if size <= 2:
        return _points(clock, steps, values) | {"every": 1, "mean": None}
    kept, means = extremes(values, size), range(0, len(values), size)
    middles = [steps[min(start + size // 2, len(steps) - 1)] for start in means]
    averages = [_mean(values[start : start + size]) for start in means]
    return _points(clock, [steps[k] for k in kept], [values[k] for k in kept]) | {
        "every": size,
        "mean": _points(clock, middles, averages),
    }


def extremes(values: Sequence[float], size: int) -> list[int]:
    """Of each stretch of `size` values, where its least and its greatest are; first and last too.

    >>> extremes([3.0, 1.0, 2.0, 5.0, 4.0, 4.5], 3)
    [0, 1, 3, 4, 5]
    """
    kept = {0, len(values) - 1}
    for start in range(0, len(values), size):
        stretch = values[start : start + size]
        kept |= {start + stretch.index(min(stretch)), start + stretch.index(max(stretch))}
    return sorted(kept)


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)  # the sum may be beyond what a float holds


def _points(clock: _Clock, steps: list[float], values: list[float]) -> dict[str, Any]:
    rows = [clock.at(step) for step in steps]
    return {unit: [row[unit] for row in rows] for unit in _UNITS} | {"value": values}
