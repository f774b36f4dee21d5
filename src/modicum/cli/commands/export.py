"""`modicum export`: what a run made, in the files of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from modicum.cli.options import RunArgument
from modicum.cli.places import check_file


def export(
    run: RunArgument,
    form: Annotated[
        Literal["gguf", "gguf-adapter"],
        typer.Option(help="llama.cpp's file of the merged model, or of its LoRA alone."),
    ] = "gguf",
    out: Annotated[
        Path | None, typer.Option(help="The file; by default in the run, named by its type.")
    ] = None,
    dtype: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"], typer.Option(help="The type of the matrices.")
    ] = "f16",
) -> None:
    """Write what a run made as a file for llama.cpp.

    A run's adapter is merged first, in memory. RUN may be the folder of a model, too.
    """
    from modicum.cli.exporting import exported

    adapter = form == "gguf-adapter"
    name = f"{'adapter' if adapter else 'model'}-{dtype}.gguf"
    print(exported(run, check_file(out or run / name, "--out"), adapter=adapter, dtype=dtype))
