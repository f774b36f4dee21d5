"""`modicum watch`: runs in a browser, while they train."""

from __future__ import annotations

from typing import Annotated

import typer

from modicum.cli.options import RunsArgument


def watch(
    runs: RunsArgument,
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 shows the runs to the network.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")
    ] = 8321,
) -> None:
    """Show runs in a browser while they train."""
    from modicum.report.watch import watch as serve

    def ready(address: str) -> None:
        print(f"{address}  (Ctrl-C ends this; the runs do not notice)", flush=True)

    serve(runs, host, port, ready)
