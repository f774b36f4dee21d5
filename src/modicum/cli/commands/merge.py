"""`modicum merge`: an adapter folded into its model."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.options import RunArgument, TrustOption
from modicum.cli.places import check_folder
from modicum.core.errors import InputError


def merge(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="The folder for the merged model.")],
    trust_remote_code: TrustOption = False,
) -> None:
    """Fold a run's adapter into its base model.

    The merged model is saved as a folder in Hugging Face's format.
    """
    from modicum.models import saving
    from modicum.serve import load_run

    check_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise InputError("there is something already; give --out a new folder", file=out)
    conversation = load_run(run, trust_remote_code=trust_remote_code)
    if conversation.adapter is None:
        raise InputError("this run has no adapter; its model is in model/", file=run)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        conversation.adapter.merge(dense=next(conversation.model.parameters()).dtype)
    for warning in told:
        print(f"warning: {warning.message}", file=sys.stderr)
    conversation.adapter.detach()
    files = sorted((run / "tokenizer").glob("*"))
    print(saving.save(conversation.model, out, files=files))
