"""`modicum plan`: what a recipe would cost."""

from __future__ import annotations

from modicum.cli.options import JsonOption, RanksOption, RecipeArgument, SetOption


def plan(
    recipe: RecipeArgument,
    set_: SetOption = None,
    as_json: JsonOption = False,
    ranks: RanksOption = None,
) -> None:
    """Show what a recipe would cost, without running it."""
    from modicum.cli import train as run

    run.show_plan(run.Asked(recipe, tuple(set_ or ()), as_json=as_json, ranks=ranks), None)
