"""`modicum checkpoint`: checkpoints in other forms."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from modicum.cli.places import check_folder

checkpoint = typer.Typer(name="checkpoint", help="Work on checkpoints.", no_args_is_help=True)


@checkpoint.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A run folder, or a checkpoint's.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A folder that is not there yet.")
    ],
    to: Annotated[
        Literal["dcp", "modicum"],
        typer.Option(help="dcp: as PyTorch's dcp.load reads it; modicum: as a run resumes from."),
    ] = "dcp",
) -> None:
    """Write a checkpoint in the form of torch.distributed.checkpoint, or bring one back.

    Back comes what modicum.checkpoint.dcp.SafetensorsWriter wrote: nothing is unpickled.
    """
    from modicum.checkpoint.conversion import convert as write

    check_folder(target, "TARGET")
    print(write(source, target, to, lambda text: print(f"warning: {text}", file=sys.stderr)))
