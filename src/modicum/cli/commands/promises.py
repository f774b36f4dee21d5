"""`modicum promises`: whether what modicum promises is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.core.errors import FoundWanting


def promises(
    only: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Promises; all without any.")
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Run commands of many minutes too.")] = False,
    file: Annotated[Path, typer.Option(help="The file of promises.")] = Path("promises.yaml"),
) -> None:
    """Check what modicum promises its users.

    Commands of many minutes are not run without --long: their committed results are read.
    Ends with exit code 5 when a promise is not kept.
    """
    from modicum.cli.promises import run_promises

    rows = run_promises(file, only=tuple(only or ()), long=long)
    broken = [row["id"] for row in rows if not row["kept"]]
    if broken:
        raise FoundWanting(f"not kept: {', '.join(broken)}")
