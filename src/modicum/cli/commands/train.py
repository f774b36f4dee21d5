"""`modicum train`: plan a recipe and run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import JsonOption, ProgressStyle, RanksOption, RecipeArgument, SetOption


def train(
    recipe: RecipeArgument,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; runs/RECIPE where it is not given.")
    ] = None,
    set_: SetOption = None,
    fork: Annotated[
        Path | None, typer.Option(help="Start a new run from this run's newest checkpoint.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew at step 1 and replace the run there.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and do nothing.")
    ] = False,
    progress: Annotated[ProgressStyle, typer.Option(help="How to show progress.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings.")] = False,
    as_json: JsonOption = False,
    ranks: RanksOption = None,
) -> None:
    """Plan and run a recipe; given again, resume where it stopped."""
    from modicum.cli import train as run

    mode: ProgressStyle = "quiet" if quiet else progress
    asked = run.Asked(recipe, tuple(set_ or ()), out, fork, mode, as_json, ranks, restart)
    if dry_run:
        run.show_plan(asked, None if restart else asked.folder)
    else:
        run.train(asked)
