"""`modicum init`: a recipe to start from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import JsonOption, SetOption
from modicum.cli.places import check_file


def init(
    model: Annotated[
        str | None, typer.Option(help="A model folder, or hub:OWNER/NAME; without it, a new one.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A folder of text, a text or a file of rows.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="`full` or an adapter; without it, what fits the memory."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="The budget, as in 8GB.")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("recipe.yaml"),
    set_: SetOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing; take the default of every question.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Look at model and data, and write a recipe to start from.

    It is checked and planned, and a JSON schema for editors stands next to it.
    """
    from modicum.cli import init as made_by
    from modicum.cli.tables import print_json

    check_file(out, "--out")
    made = made_by.write_recipe(
        out,
        model=model,
        data=data,
        method=method,
        memory=memory,
        overrides=set_ or (),
        asks=sys.stdin.isatty() and not yes,
    )
    if as_json:
        print_json(made_by.as_json(made, out))
    else:
        print("\n".join(made_by.lines_of(made, out)))
    if (refused := made_by.refusal_of(made, out)) is not None:
        raise refused
