"""`modicum verify`: whether one's own data and runs are what they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import (
    JsonOption,
    RanksOption,
    RecipeArgument,
    RunArgument,
    SetOption,
    ToleranceOption,
)

verify = typer.Typer(
    name="verify",
    help="Check data, whether a run resumes, or its exports.",
    no_args_is_help=True,
)


@verify.command("data")
def verify_data(
    recipe: RecipeArgument,
    set_: SetOption = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SHARE",
            help="The largest share of documents that may be so, 0 to 1; may be given again.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a recipe's data against limits: duplicates, overlap, empty answers, missing ends."""
    from modicum.cli.verifying import check_data

    check_data(recipe, tuple(set_ or ()), tuple(limit or ()), as_json=as_json)


@verify.command("resume")
def verify_resume(
    run: RunArgument,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare after the restoring.")] = 4,
    ranks: RanksOption = None,
    tolerance: ToleranceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a run, restore it, and compare with the uninterrupted continuation, in copies."""
    from modicum.cli.verifying import check_resume

    check_resume(run, steps=steps, ranks=ranks, tolerance=tolerance, as_json=as_json)


@verify.command("stretch", hidden=True)
def verify_stretch(file: Annotated[Path, typer.Argument()]) -> None:
    """What the processes do that `verify resume` and `reproduce` start."""
    from modicum.cli.stretches import do_stretch

    do_stretch(file)


@verify.command("export")
def verify_export(
    run: RunArgument,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also a model or adapter that was made of the run."),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Held-out prompts, 4; of a classifier held-out rows, 32."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens written after each prompt.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Hold what a run exported against its trained weights: logits, and greedy text or class."""
    from modicum.cli.verifying import check_export

    check_export(run, against, prompts=prompts, tokens=tokens, as_json=as_json)
