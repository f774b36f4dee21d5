"""`modicum plan`: what a recipe would cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import JsonOption, RanksOption, RecipeArgument, SetOption


def plan(
    recipe: RecipeArgument,
    set_: SetOption = None,
    traced: Annotated[
        bool, typer.Option("--traced", help="Trace the model: --set budget.ledger=traced.")
    ] = False,
    why: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Say why a field has its value.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Show another recipe's plan next to it.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Plan for rtx4090, h100-80g, laptop-16g or a file."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a step's memory: .svg, .png or .pdf.")
    ] = None,
    as_json: JsonOption = False,
    ranks: RanksOption = None,
    hosts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Plan for --ranks on N hosts like this one.")
    ] = 1,
) -> None:
    """Show what a recipe would cost, without running it."""
    from modicum.cli import planning
    from modicum.cli import train as run

    overrides = (*(set_ or ()), *(["budget.ledger=traced"] if traced else []))
    asked = run.Asked(recipe, overrides, as_json=as_json, ranks=ranks)
    planning.show(planning.PlanView(asked, why, compare, machine, picture, hosts))
