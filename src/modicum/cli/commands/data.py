"""`modicum data`: the rows that a recipe trains on."""

from __future__ import annotations

from typing import Annotated

import typer

from modicum.cli.options import RecipeArgument, SetOption


def data(
    recipe: RecipeArgument,
    set_: SetOption = None,
    rows: Annotated[
        int | None, typer.Option(min=0, help="Rows to show; 3, or all of them with --json.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each row.")
    ] = False,
) -> None:
    """Show the rows that a recipe trains on."""
    from modicum.cli.data import show

    count = rows if rows is not None else None if as_json else 3
    show(recipe, tuple(set_ or ()), rows=count, as_json=as_json)
