"""`modicum report`: a run as a page, or as figures; several runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import JsonOption, RunsArgument
from modicum.core.errors import InputError


def report(
    runs: RunsArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page of several runs; comparison.html where it is not given. That of one "
            "run is report.html in its folder.",
        ),
    ] = None,
    as_text: Annotated[
        bool, typer.Option("--text", help="Print tables on standard output instead.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run, a comparison or several runs anew."""
    from modicum import report as reports

    if as_text:
        _print(runs, out, as_json)
    elif as_json:
        from modicum.cli.tables import print_json

        summaries = [reports.summary(run) for run in runs]
        print_json(summaries if len(runs) > 1 else summaries[0])
    elif len(runs) == 1 and out is None:
        comparison = reports.is_comparison(runs[0])
        print((reports.write_comparison if comparison else reports.write)(runs[0]))
    else:
        print(reports.compare(runs, out or "comparison.html"))


def _print(runs: list[Path], out: Path | None, as_json: bool) -> None:
    """The runs as text, one after the other."""
    from modicum.cli.run_text import print_run

    if as_json or out is not None:
        other = "--json" if as_json else "--out"
        raise InputError(f"--text and {other} are two forms of a report; give one", field="--text")
    for number, run in enumerate(runs):
        print(end="\n" if number else "")
        print_run(run)
