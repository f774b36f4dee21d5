"""`modicum init`: a recipe to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.places import check_file


def init(
    model: Annotated[
        str | None, typer.Option(help="A model folder; without it, a new one.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A folder of text, a text or .jsonl file.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="An adapter, for a model folder.")] = "lora",
    memory: Annotated[str | None, typer.Option(help="The budget, as in 8GB.")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("recipe.yaml"),
) -> None:
    """Write a recipe to start from.

    It is checked, and a JSON schema for editors stands next to it.
    """
    from modicum.cli.init import write_recipe

    check_file(out, "--out")
    for path in write_recipe(out, model=model, data=data, adapter=adapter, memory=memory):
        print(f"wrote {path}")
    print(f"next: modicum plan {out}; modicum train {out}")
