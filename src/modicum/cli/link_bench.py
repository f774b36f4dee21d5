"""`modicum bench link`: measures the links between ranks, on which plans for several rest."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict

import typer

from modicum.cli.tables import print_json, table
from modicum.core.errors import InputError
from modicum.core.machine.links import keep_links
from modicum.core.units import format_bytes
from modicum.parallel.rank_environment import place, started_elsewhere

_WORDS = {"local": "ranks of one host", "node": "hosts"}


def bench_link(ranks: int | None, *, as_json: bool) -> None:
    """Measure, keep what was found, and print it; as one of the ranks, or as who starts them.

    Raises:
        InputError: there is one rank alone.
        typer.Exit: ranks ended badly, and why has been said.
    """
    if ranks is not None and started_elsewhere():
        problem = "this process is a rank already (RANK is set, as torchrun does)"
        raise InputError(problem, field="--ranks", value=ranks, allowed="leave it out")
    if ranks is not None and ranks > 1:
        _start(ranks, as_json=as_json)
        return
    from modicum.core.ranks.link_bench import measure_links
    from modicum.core.ranks.ranks import joined

    with joined() as joint:
        found = measure_links(joint)
    if not place().first:
        return
    file = keep_links({axis: link for axis, (link, _) in found.items()})
    if as_json:
        rows = {
            axis: asdict(link) | {"points": [asdict(point) for point in points]}
            for axis, (link, points) in found.items()
        }
        print_json({"links": rows, "file": str(file)})
        return
    for axis, (link, points) in found.items():
        table(
            (f"Between {_WORDS[axis]}", "", ""),
            [
                ("a step", f"{link.latency * 1e6:.0f} us", f"of a call among {link.ranks} ranks"),
                ("rate", f"{format_bytes(link.rate)}/s", f"{8e-6 * link.rate:,.0f} Mb/s"),
                ("processor", f"{link.cpu * 2**20 * 1e3:.2f} ms", "for each MiB that a rank sends"),
                *(
                    (format_bytes(p.bytes), f"{p.median * 1e3:.2f} ms",
                     f"summed; {p.least * 1e3:.2f} to {p.most * 1e3:.2f}")
                    for p in points
                ),
                ("kept in", str(file), ""),
            ],
        )  # fmt: skip


def _start(ranks: int, *, as_json: bool) -> None:
    from modicum.parallel.launch import Supervisor

    where = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    command = [sys.executable, *where, "-m", "modicum", "bench", "link"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    code = Supervisor([*command, *(["--json"] if as_json else [])], ranks, environment=environment)
    if ended := code.run():
        raise typer.Exit(ended)
