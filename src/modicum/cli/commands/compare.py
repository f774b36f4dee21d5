"""`modicum compare`: which method or recipe is better, by how much, at the same cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from modicum.cli.options import JsonOption, ProgressStyle, RanksOption, SetOption


def compare(
    recipes: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE...", help="Recipes, a side each; or one, with --vary."),
    ],
    vary: Annotated[
        str | None,
        typer.Option(metavar="SECTION=A,B", help="The one recipe with each of these methods."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="KIND=AMOUNT",
            help="What each run may spend: tokens=500k, seconds=300, state=8MB, peak=2GB or "
            "trained=100kB; not given: what the recipes say.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder; not given: in compare/, named after recipes, section and protocol."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Settings to try on each side.")] = 12,
    seeds: Annotated[int, typer.Option(min=1, help="Fresh seeds that judge each side.")] = 5,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD,FIELD",
            help="Fields to tune, of the methods' search tables; not given: one for every four "
            "trials, the first of each table.",
        ),
    ] = None,
    sampler: Annotated[
        Literal["tpe", "random", "grid"], typer.Option(help="What chooses the settings to try.")
    ] = "tpe",
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="SIDE",
            help="Compare with this side; not given: with that of the least loss, and under "
            "--protocol with the first.",
        ),
    ] = None,
    parallel: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs at once; they share the cores.")
    ] = 1,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Who asks for trials, such as fair_optim; needs --budget tokens=...; --trials is "
            "then the most settings of a side at one amount of data.",
        ),
    ] = None,
    on: Annotated[
        Literal["ray"] | None, typer.Option(help="Run trials on a cluster of Ray.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train also what another comparison has trained alike.")
    ] = False,
    retry: Annotated[
        bool,
        typer.Option("--retry", help="Run again what crashed, ran out of memory or was refused."),
    ] = False,
    ranks: RanksOption = None,
    set_: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show runs, hours and bytes, and do nothing.")
    ] = False,
    progress: Annotated[ProgressStyle, typer.Option(help="How to show progress.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tune methods alike, and judge them by fresh seeds."""
    from modicum.cli.comparing import CompareCommand

    CompareCommand(
        recipes=tuple(recipes), vary=vary, budget=budget, out=out, trials=trials, seeds=seeds,
        tune=tuple(name.strip() for name in (tune or "").split(",") if name.strip()),
        sampler=sampler, baseline=baseline, parallel=parallel, ranks=ranks or 1, on=on,
        protocol=protocol, fresh=fresh, retry=retry, overrides=tuple(set_ or ()),
        mode="quiet" if quiet else progress, as_json=as_json,
    ).run(dry_run=dry_run)  # fmt: skip
