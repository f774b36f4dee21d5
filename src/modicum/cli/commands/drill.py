"""`modicum drill`: recipes drawn at random, run, killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import JsonOption
from modicum.cli.places import check_file, check_folder
from modicum.core.contracts.method import LARGEST_SEED


def drill(
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Which recipes are drawn.")
    ] = 0,
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 40,
    work: Annotated[
        Path | None, typer.Option(help="Where runs are kept that went wrong; else nowhere.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results there, as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw recipes at random; run, kill, resume and export each.

    A recipe is refused with a reason, or what it does must be what was forecast: exit 5 if not.
    """
    from modicum.cli.drill import run_drill

    if work is not None:
        check_folder(work, "--work")
    if output is not None:
        check_file(output, "--output")
    run_drill(seed, count, work=work, output=output, as_json=as_json)
