"""`modicum demo`: a model trained and adapted, to look at; or labelled texts to train one on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import ProgressStyle
from modicum.cli.places import check_folder


def demo(
    runs: Annotated[Path, typer.Option(help="Where the run folders go.")] = Path("runs"),
    progress: Annotated[ProgressStyle, typer.Option(help="How to show progress.")] = "auto",
    functions: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Train nothing; write data of functions-full there."),
    ] = None,
) -> None:
    """Train a small code model, then adapt it under a budget.

    With --functions: functions of Python's standard library, labelled by package, in rows.
    """
    from modicum.cli.demo import run_demo, show_functions

    if functions is not None:
        show_functions(check_folder(functions, "--functions"))
    else:
        run_demo(check_folder(runs, "--runs"), progress)
