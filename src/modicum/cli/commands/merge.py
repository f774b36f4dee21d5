"""`modicum merge`: an adapter folded into its model."""

from __future__ import annotations

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
    from modicum.cli.exporting import fold
    from modicum.core.layers.full_model import full_model_of
    from modicum.data.tokenizer import Tokenizer
    from modicum.data.tokenizer_files import exported_files
    from modicum.models import saving
    from modicum.serve import load_adapted

    check_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise InputError("there is something already; give --out a new folder", file=out)
    model, adapter = load_adapted(run, trust_remote_code=trust_remote_code)
    fold(model, adapter)
    kept = run / "tokenizer"
    writes = getattr(model, "trained_heads", None) is None  # text; a classifier has no end
    end = Tokenizer.load(kept).eos_id if writes else None
    print(saving.save(model, out, files=exported_files(kept), end=end))
    if (full := full_model_of(model)) is not None:
        full.write(out)
