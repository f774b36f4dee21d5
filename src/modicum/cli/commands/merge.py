"""`modicum merge`: an adapter folded into its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import RunArgument
from modicum.cli.places import check_folder
from modicum.core.errors import InputError


def merge(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="The folder for the merged model.")],
) -> None:
    """Fold a run's adapter into its base model.

    The merged model is saved as a folder in Hugging Face's format.
    """
    from modicum.cli.exporting import fold
    from modicum.models import saving
    from modicum.serve import load_run

    check_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise InputError("there is something already; give --out a new folder", file=out)
    conversation = load_run(run)
    if conversation.adapter is None:
        raise InputError("this run has no adapter; its model is in model/", file=run)
    fold(conversation)
    files = sorted((run / "tokenizer").glob("*"))
    print(saving.save(conversation.model, out, files=files))
