"""The commands. Each imports what it needs when it runs: a list, a typo must not wait for torch."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from modicum.cli.places import check_file, check_folder
from modicum.core.contracts.method import LARGEST_SEED
from modicum.core.errors import FoundWanting, InputError, Interrupted


class Commands(TyperGroup):
    """The commands; how they end is reported by modicum.cli.main, not by typer's exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run one.

        Raises:
            Interrupted: Ctrl-C or SIGTERM, with nothing to save or at once.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command resumes") from None


ProgressStyle = Literal["auto", "live", "lines", "json", "quiet"]
app = typer.Typer(
    cls=Commands,
    name="modicum",
    help="Train, adapt and serve models on a modicum of memory: a budget in, a trained model out.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A recipe file, or the name of one that ships with modicum."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field; may be given again."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
RanksOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Share the work between N processes on this machine."),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
PluginOption = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="A Python file with methods of your own."),
]


def _version(value: bool) -> None:
    if value:
        from modicum import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of `modicum` itself."""


@app.command()
def train(
    recipe: RecipeArgument,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; runs/RECIPE where it is not given.")
    ] = None,
    set_: SetOption = None,
    fork: Annotated[
        Path | None, typer.Option(help="Start a new run from this run's newest checkpoint.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew at step 1 and replace the run there.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and do nothing.")
    ] = False,
    progress: Annotated[ProgressStyle, typer.Option(help="How to show progress.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings.")] = False,
    as_json: JsonOption = False,
    ranks: RanksOption = None,
) -> None:
    """Plan and run a recipe; given again, resume where it stopped."""
    from modicum.cli import train as run

    mode: ProgressStyle = "quiet" if quiet else progress
    asked = run.Asked(recipe, tuple(set_ or ()), out, fork, mode, as_json, ranks, restart)
    if dry_run:
        run.show_plan(asked, None if restart else asked.folder)
    else:
        run.train(asked)


@app.command()
def plan(
    recipe: RecipeArgument,
    set_: SetOption = None,
    as_json: JsonOption = False,
    ranks: RanksOption = None,
) -> None:
    """Show what a recipe would cost, without running it."""
    from modicum.cli import train as run

    run.show_plan(run.Asked(recipe, tuple(set_ or ()), as_json=as_json, ranks=ranks), None)


@app.command()
def data(
    recipe: RecipeArgument,
    set_: SetOption = None,
    rows: Annotated[
        int | None, typer.Option(min=0, help="Rows to show; 3, or all of them with --json.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each row.")
    ] = False,
) -> None:
    """Show the rows that a recipe trains on."""
    from modicum.cli.data import show

    count = rows if rows is not None else 0 if as_json else 3
    show(recipe, tuple(set_ or ()), rows=count, as_json=as_json)


@app.command()
def init(
    model: Annotated[
        str | None, typer.Option(help="A model folder; without it, a new one.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A folder of text, a text or .jsonl file.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="An adapter, for a model folder.")] = "lora",
    memory: Annotated[str | None, typer.Option(help="The budget, as in 8GB.")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("recipe.yaml"),
) -> None:
    """Write a recipe to start from.

    It is checked, and a JSON schema for editors stands next to it.
    """
    from modicum.cli.init import write_recipe

    check_file(out, "--out")
    for path in write_recipe(out, model=model, data=data, adapter=adapter, memory=memory):
        print(f"wrote {path}")
    print(f"next: modicum plan {out}; modicum train {out}")


@app.command()
def schema() -> None:
    """Print the recipe's JSON schema, for editors."""
    from modicum.cli.tables import print_json
    from modicum.recipe_yaml import json_schema

    print_json(json_schema())


@app.command()
def methods(
    room: Annotated[str | None, typer.Option(help="Only the methods of one room.")] = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """List every method, with the honest state it is in."""
    from modicum.cli.tables import print_methods
    from modicum.core.contracts.catalog import ROOMS, catalog

    if room is not None and room not in ROOMS:
        raise InputError(
            "unknown room", field="--room", value=room, allowed=", ".join(ROOMS), candidates=ROOMS
        )
    records = [r for r in catalog(plugin or ()).values() if room is None or r.room == room]
    print_methods([record.as_json() for record in records], as_json)


@app.command()
def prove(
    name: Annotated[str, typer.Argument(metavar="METHOD", help="Its name.")],
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
    """Measure a method's claim against its baseline, here and now."""
    from modicum import proofs
    from modicum.cli.live import listener
    from modicum.cli.tables import print_proof

    if save is not None:
        check_folder(save, "--save")
    with listener("quiet" if as_json else "auto") as tell:
        proof = proofs.prove(
            name, null=null, full=full, fresh=fresh, plugins=plugin or (), listener=tell
        )
    if save is not None:
        proofs.write(proof, save)
    print_proof(proof.as_json(), as_json=as_json)


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A Python file with a method of your own.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Run the room's battery of tests on every method in a file."""
    from modicum.cli.checking import run_checks

    run_checks(file, as_json=as_json)


@app.command()
def report(run: RunArgument, as_json: JsonOption = False) -> None:
    """Write a run's report anew, and say where it is."""
    from modicum import report as reports

    if as_json:
        from modicum.cli.tables import print_json

        print_json(reports.summary(run))
    else:
        print(reports.write(run))


@app.command()
def chat(
    run: RunArgument,
    prompt: Annotated[
        str | None, typer.Option(help="Continue this text and end; else ask for text.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for the likeliest.")] = 0.7,
    seed: Annotated[
        int | None, typer.Option(min=0, max=LARGEST_SEED, help="The same seed writes the same.")
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Without the run's adapter.")] = False,
) -> None:
    """Let a run's model write."""
    from modicum.cli.chat import converse
    from modicum.serve import load_run

    conversation = load_run(run)
    if base:
        if conversation.adapter is None:
            raise InputError("this run has no adapter to leave out", file=run, field="--base")
        conversation.adapter.deactivate()
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    converse(conversation, prompt, options)


@app.command()
def merge(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="The folder for the merged model.")],
) -> None:
    """Fold a run's adapter into its base model.

    The merged model is saved as a folder in Hugging Face's format.
    """
    from modicum.models import saving
    from modicum.serve import load_run

    check_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise InputError("there is something already; give --out a new folder", file=out)
    conversation = load_run(run)
    if conversation.adapter is None:
        raise InputError("this run has no adapter; its model is in model/", file=run)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        conversation.adapter.merge(dense=next(conversation.model.parameters()).dtype)
    for warning in told:
        print(f"warning: {warning.message}", file=sys.stderr)
    conversation.adapter.detach()
    files = sorted((run / "tokenizer").glob("*"))
    print(saving.save(conversation.model, out, files=files))


@app.command()
def demo(
    runs: Annotated[Path, typer.Option(help="Where the run folders go.")] = Path("runs"),
    progress: Annotated[ProgressStyle, typer.Option(help="How to show progress.")] = "auto",
) -> None:
    """Train a small code model, then adapt it under a budget."""
    from modicum.cli.demo import run_demo

    run_demo(check_folder(runs, "--runs"), progress)


@app.command()
def drill(
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Which recipes are drawn.")
    ] = 0,
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 40,
    work: Annotated[
        Path | None, typer.Option(help="Where runs are kept that went wrong; else nowhere.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results there, as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw recipes at random; run, kill, resume and export each.

    A recipe is refused with a reason, or what it does must be what was forecast: exit 5 if not.
    """
    from modicum.cli.drill import run_drill

    if work is not None:
        check_folder(work, "--work")
    if output is not None:
        check_file(output, "--output")
    run_drill(seed, count, work=work, output=output, as_json=as_json)


bench = typer.Typer(help="Measure what plans rest on.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command()
def machine(
    again: Annotated[bool, typer.Option("--again", help="Measure it anew.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What was measured of this machine, once: what forecasts of memory and speed rest on."""
    from modicum.cli.bench import show_machine

    show_machine(again=again, as_json=as_json)


checkpoint = typer.Typer(help="Work on checkpoints.", no_args_is_help=True)
app.add_typer(checkpoint, name="checkpoint")


@checkpoint.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A run folder, or a checkpoint's.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A folder that is not there yet.")
    ],
    to: Annotated[
        Literal["dcp", "modicum"],
        typer.Option(help="dcp: as PyTorch's dcp.load reads it; modicum: as a run resumes from."),
    ] = "dcp",
) -> None:
    """Write a checkpoint in the form of torch.distributed.checkpoint, or bring one back.

    Back comes what modicum.checkpoint.dcp.SafetensorsWriter wrote: nothing is unpickled.
    """
    from modicum.checkpoint.conversion import convert as write

    check_folder(target, "TARGET")
    print(write(source, target, to, lambda text: print(f"warning: {text}", file=sys.stderr)))


@app.command()
def promises(
    only: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Promises; all without any.")
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Run commands of many minutes too.")] = False,
    file: Annotated[Path, typer.Option(help="The file of promises.")] = Path("promises.yaml"),
) -> None:
    """Check what modicum promises its users.

    Commands of many minutes are not run without --long: their committed results are read.
    Ends with exit code 5 when a promise is not kept.
    """
    from modicum.cli.promises import run_promises

    rows = run_promises(file, only=tuple(only or ()), long=long)
    broken = [row["id"] for row in rows if not row["kept"]]
    if broken:
        raise FoundWanting(f"not kept: {', '.join(broken)}")


if __name__ == "__main__":
    sys.exit(app())
