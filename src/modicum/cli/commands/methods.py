"""`modicum methods`: the catalog."""

from __future__ import annotations

from typing import Annotated

import typer

from modicum.cli.completion import method_names, room_names
from modicum.cli.options import JsonOption, PluginOption
from modicum.core.errors import InputError


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="One method, with its fields.", autocompletion=method_names),
    ] = None,
    room: Annotated[
        str | None,
        typer.Option(help="Only the methods of one room.", autocompletion=room_names),
    ] = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """List every method and its honest state, or say what one takes."""
    from modicum.cli.method_list import print_methods
    from modicum.cli.method_page import method_json, print_method
    from modicum.core.contracts.catalog import ROOMS, catalog, find

    if room is not None and room not in ROOMS:
        raise InputError(
            "unknown room", field="--room", value=room, allowed=", ".join(ROOMS), candidates=ROOMS
        )
    if name is not None:
        if room is not None:
            raise InputError("lists a room; a method is in one already", field="--room", value=room)
        print_method(find(name, plugin or ()), as_json)
        return
    records = [r for r in catalog(plugin or ()).values() if room is None or r.room == room]
    print_methods([method_json(record) for record in records], as_json)
