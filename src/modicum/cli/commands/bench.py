"""`modicum bench`: what plans rest on, measured."""

from __future__ import annotations

from typing import Annotated

import typer

from modicum.cli.options import JsonOption, RanksOption

bench = typer.Typer(name="bench", help="Measure what plans rest on.", no_args_is_help=True)


@bench.command()
def machine(
    again: Annotated[bool, typer.Option("--again", help="Measure it anew.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What was measured of this machine, once: what forecasts of memory and speed rest on."""
    from modicum.cli.bench import show_machine

    show_machine(again=again, as_json=as_json)


@bench.command()
def link(ranks: RanksOption = None, as_json: JsonOption = False) -> None:
    """What a call between ranks takes: a step, a byte, and a byte of processor, by axis.

    Under torchrun, between the hosts that it was started on; else between N processes here.
    """
    from modicum.cli.link_bench import bench_link

    bench_link(ranks, as_json=as_json)
