"""`modicum export`: what a run made, in the files of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from modicum.cli.options import RunArgument, TrustOption
from modicum.cli.places import check_file, check_folder
from modicum.core.errors import InputError


def export(
    run: RunArgument,
    form: Annotated[
        Literal["gguf", "gguf-adapter", "peft"],
        typer.Option(
            help="llama.cpp's file of the merged model, or of its LoRA alone; or the adapter "
            "folded into a LoRA of --rank, in PEFT's folder."
        ),
    ] = "gguf",
    out: Annotated[
        Path | None,
        typer.Option(help="The file or folder; by default in the run, named by its type."),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Of the LoRA of --form peft.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="What folding may lose of what the adapter changes, in the logits of the run's "
            "validation data, or in the weights where it has none; by default 0.01.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"],
        typer.Option(
            help="The type of the matrices; llama-quantize of llama.cpp makes others, such as "
            "q4_k, of a file in f32 or bf16."
        ),
    ] = "f16",
    trust_remote_code: TrustOption = False,
) -> None:
    """Write a run's model for llama.cpp, or its adapter for PEFT.

    For a model, a run's adapter is merged first, in memory. RUN may be the folder of a model, too.
    """
    from modicum.cli.exporting import exported, folded_for_peft

    if form == "peft":
        if rank is None:
            problem = "--form peft folds the adapter into a LoRA; say of which rank"
            raise InputError(problem, field="--rank")
        folder = check_folder(out or run / f"adapter-rank-{rank}", "--out")
        print(
            folded_for_peft(run, folder, rank=rank, tolerance=tolerance, trusted=trust_remote_code)
        )
        return
    if rank is not None or tolerance is not None:
        field = "--tolerance" if rank is None else "--rank"
        raise InputError("is for --form peft", field=field, value=rank or tolerance)
    adapter = form == "gguf-adapter"
    name = f"{'adapter' if adapter else 'model'}-{dtype}.gguf"
    file = check_file(out or run / name, "--out")
    print(exported(run, file, adapter=adapter, dtype=dtype, trusted=trust_remote_code))
