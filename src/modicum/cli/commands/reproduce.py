"""`modicum reproduce`: a run made anew from what its folder says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import JsonOption, RanksOption, RunArgument, ToleranceOption


def reproduce(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(help="The new run folder; RUN-again where it is not given.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The first so many steps alone.")] = None,
    ranks: RanksOption = None,
    tolerance: ToleranceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a run anew from its folder, and compare the two."""
    from modicum.cli.verifying import reproduce_run

    reproduce_run(run, out, steps=steps, ranks=ranks, tolerance=tolerance, as_json=as_json)
