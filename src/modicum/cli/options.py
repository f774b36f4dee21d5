"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from modicum.core.errors import InputError

ProgressStyle = Literal["auto", "live", "lines", "json", "quiet"]
RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A recipe file, or the name of one that ships with modicum."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field, as in budget.memory=8GB; may be repeated.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
RanksOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Share the work between N processes on this machine."),
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="SHARE",
        help="How far figures may be apart where bits cannot be the same, over themselves.",
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
RunsArgument = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="A run folder, or several.")
]
PluginOption = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="A Python file with methods of your own."),
]
AdaptersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]FOLDER",
        help="One more adapter of the base, by the folder's name if no other is given; may be "
        "repeated.",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python files of the model's folder, and the plugins that the run's recipe "
        "names; they can do whatever you can.",
    ),
]


def named_adapters(given: list[str] | None) -> dict[str, Path]:
    """What `--adapter NAME=FOLDER` or `--adapter FOLDER`, repeated, says.

    A folder alone gives the adapter its name; one whose path has a `=` is taken so if it is there.

    Raises:
        InputError: one has no name or folder, or two have one name.
    """
    found: dict[str, Path] = {}
    for text in given or []:
        name, equals, folder = text.partition("=")
        if not equals or Path(text).is_dir():
            name, folder = os.path.basename(os.path.abspath(text)), text
        if not (name and folder):
            problem = "say it as NAME=FOLDER, or as FOLDER alone"
            raise InputError(problem, field="--adapter", value=text)
        if name in found:
            problem = "two adapters have one name; give one of them another, as NAME=FOLDER"
            raise InputError(problem, field="--adapter", value=name)
        found[name] = Path(folder)
    return found
