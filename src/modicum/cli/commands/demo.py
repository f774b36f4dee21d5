"""`modicum demo`: a model trained and adapted, to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import ProgressStyle
from modicum.cli.places import check_folder


def demo(
    runs: Annotated[Path, typer.Option(help="Where the run folders go.")] = Path("runs"),
    progress: Annotated[ProgressStyle, typer.Option(help="How to show progress.")] = "auto",
) -> None:
    """Train a small code model, then adapt it under a budget."""
    from modicum.cli.demo import run_demo

    run_demo(check_folder(runs, "--runs"), progress)
