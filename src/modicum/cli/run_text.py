"""A run on a terminal: how far it came, its plan next to what happened, its loss, its time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from modicum.cli.tables import table
from modicum.report.columns import StepColumns
from modicum.report.facts import facts, measures
from modicum.report.folder import read
from modicum.report.numbers import NONE, percent, quantity
from modicum.report.words import visible

_STRETCHES = 10  # of the run, each with its mean loss
Losses = tuple[int, float | None, float | None]


def print_run(folder: str | Path, stream: TextIO | None = None) -> None:
    """Print what is in a run folder, as aligned text.

    Raises:
        InputError: there is no such run folder.
    """
    stream, run = stream or sys.stdout, read(folder)
    found = facts(run)
    steps, seconds = quantity(found["steps"], ""), quantity(found["seconds"], "seconds")
    name = visible(found["name"])
    stream.write(f"{name}: {found['status']} after {steps} steps in {seconds}\n")
    for note in found["notes"]:
        stream.write(f"{note}\n")
    again = found["plan_revisions"] > 1
    shown = (*(("first_plan",) if again else ()), "predicted", "measured")
    planned = ("First plan", "Last plan") if again else ("Predicted",)
    rows = [
        (
            row["what"],
            *(quantity(row[key], row["unit"]) for key in shown),
            NONE if row["difference"] is None else percent(row["difference"], signed=True),
        )
        for row in found["comparison"]
    ]
    _section(("The plan", *planned, "Measured", "Difference"), rows, stream)
    losses = [
        (str(step), quantity(trained, "nats"), quantity(checked, "nats"))
        for step, trained, checked in curve(run.metrics, run.evaluations)
    ]
    _section(("Up to step", "Training loss, mean", "Validation loss"), losses, stream)
    test = [
        (row["what"], quantity(row["test"], "nats"))
        for row in measures(run)
        if row["test"] is not None
    ]
    _section(("Metric", "Test"), test, stream)
    spent = [
        (group["what"], quantity(group["seconds"], "seconds"), percent(group["share"]),
         ", ".join(f"{p['what']} {quantity(p['seconds'], 'seconds')}" for p in group["parts"]))
        for group in (found["time"] or {}).get("groups", ())
    ]  # fmt: skip
    _section(("Where the time went", "Seconds", "Share", "Of it"), spent, stream)


def _section(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]], stream: TextIO) -> None:
    if rows:
        stream.write("\n")
        table(headers, rows, stream=stream)


def curve(metrics: StepColumns, evaluations: StepColumns) -> Iterator[Losses]:
    """Of each tenth of the steps the last one, the mean loss, and the last validation loss.

    >>> metrics = StepColumns({"step": s, "loss": 10.0 - s} for s in range(1, 5))
    >>> list(curve(metrics, StepColumns([{"step": 0, "loss": 12.0}, {"step": 4, "loss": 7.0}])))
    [(0, None, 12.0), (1, 9.0, None), (2, 8.0, None), (3, 7.0, None), (4, 6.0, 7.0)]
    """
    if evaluations.steps and evaluations.steps[0] == 0:
        yield 0, None, evaluations.row(0).get("loss")
    count = len(metrics)
    ends = sorted({round((n + 1) * count / _STRETCHES) for n in range(_STRETCHES)} - {0})
    begin = 0
    for end in ends:
        trained = metrics.points("loss", begin, end)[1]
        first, last = metrics.steps[begin], metrics.steps[end - 1]
        checked = evaluations.points("loss", *evaluations.between(first, last))[1]
        mean = sum(trained) / len(trained) if trained else None
        yield int(last), mean, checked[-1] if checked else None
        begin = end
