"""`modicum check`: a battery of tests on a method of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import JsonOption


def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A Python file with a method of your own.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Run the room's battery of tests on every method in a file."""
    from modicum.cli.checking import run_checks

    run_checks(file, as_json=as_json)
