"""`modicum plan`: what a recipe would cost."""

from __future__ import annotations

from typing import Annotated

import typer

from modicum.cli.options import JsonOption, RanksOption, RecipeArgument, SetOption


def plan(
    recipe: RecipeArgument,
    set_: SetOption = None,
    traced: Annotated[
        bool, typer.Option("--traced", help="Trace the model: --set budget.ledger=traced.")
    ] = False,
    as_json: JsonOption = False,
    ranks: RanksOption = None,
) -> None:
    """Show what a recipe would cost, without running it."""
    from modicum.cli import train as run

    overrides = (*(set_ or ()), *(["budget.ledger=traced"] if traced else []))
    run.show_plan(run.Asked(recipe, overrides, as_json=as_json, ranks=ranks), None)
