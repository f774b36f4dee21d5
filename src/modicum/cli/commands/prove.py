"""`modicum prove`: a method's claim, measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.completion import method_names
from modicum.cli.options import JsonOption, PluginOption
from modicum.cli.places import check_folder


def prove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="Its name, or several, one after the other; baselines that they share are "
            "trained once.",
            autocompletion=method_names,
        ),
    ],
    null: Annotated[
        bool, typer.Option("--null", help="Put the baseline in its place: what stood must fall.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="The full experiment; takes long.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train baselines again that another proof has trained.")
    ] = False,
    plugin: PluginOption = None,
    save: Annotated[Path | None, typer.Option(help="A folder for the result, as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a method's claim against its baseline, here and now.

    The JSON of several is a list.
    """
    from modicum import proofs
    from modicum.cli.live import listener
    from modicum.cli.tables import print_json, print_proof
    from modicum.core.contracts.catalog import find

    if save is not None:
        check_folder(save, "--save")
    elif full:
        print("the result is printed alone; --save FOLDER keeps it", file=sys.stderr)
    for name in names:
        find(name, plugin or ())  # a wrong word is said before anything is measured
    made = []
    for name in names:
        with listener("quiet" if as_json else "auto") as tell:
            proof = proofs.prove(
                name, null=null, full=full, fresh=fresh, plugins=plugin or (), listener=tell
            )
        if save is not None:
            proofs.write(proof, save)
        made.append(proof.as_json())
        if not as_json:
            print_proof(made[-1])
    if as_json:
        print_json(made if len(made) > 1 else made[0])
