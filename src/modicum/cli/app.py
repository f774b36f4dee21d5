"""The command line: the one place that registers commands, each of which is a file of `commands`.

Each imports what it needs when it runs: a list, a typo must not wait for torch.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from modicum.cli.commands.bench import bench
from modicum.cli.commands.chat import chat
from modicum.cli.commands.check import check
from modicum.cli.commands.checkpoint import checkpoint
from modicum.cli.commands.compare import compare
from modicum.cli.commands.completion import completion
from modicum.cli.commands.data import data
from modicum.cli.commands.demo import demo
from modicum.cli.commands.doctor import doctor
from modicum.cli.commands.drill import drill
from modicum.cli.commands.export import export
from modicum.cli.commands.init import init
from modicum.cli.commands.merge import merge
from modicum.cli.commands.methods import methods
from modicum.cli.commands.plan import plan
from modicum.cli.commands.promises import promises
from modicum.cli.commands.prove import prove
from modicum.cli.commands.report import report
from modicum.cli.commands.reproduce import reproduce
from modicum.cli.commands.schema import schema
from modicum.cli.commands.serve import serve
from modicum.cli.commands.train import train
from modicum.cli.commands.verify import verify
from modicum.cli.commands.watch import watch
from modicum.cli.completion import begin_if_asked
from modicum.core.errors import Interrupted

# In the order of `modicum --help`; groups come last there.
COMMANDS = (
    train,
    plan,
    data,
    init,
    schema,
    methods,
    prove,
    check,
    compare,
    report,
    watch,
    chat,
    serve,
    merge,
    export,
    demo,
    doctor,
    drill,
    promises,
    reproduce,
    completion,
)
GROUPS = (bench, checkpoint, verify)
# What continues a run that is there, and what is there to be ended.
_USAGE: type[Exception] = typer.BadParameter.__mro__[1]  # of any mistake in the command line
RESUMING, LISTENING = ("train", "demo", "compare"), ("chat", "serve", "watch")


class Commands(TyperGroup):
    """The commands; how they end is reported by modicum.cli.main, not by typer's exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run one.

        Raises:
            InputError: an option or argument has a value that it does not take, or an option is
                a recipe's field, or a command is at another place.
            Interrupted: Ctrl-C or SIGTERM, with nothing to save or at once.
        """
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from modicum.cli.usage import refused

            if type(error) is not typer.BadParameter:  # an argument is missing: the usage helps
                raise
            raise refused(error) from None
        except _USAGE as error:
            from modicum.cli.usage import as_field, elsewhere

            if (told := as_field(error) or elsewhere(error)) is None:
                raise
            raise told from None
        except KeyboardInterrupt:
            raise Interrupted(_interrupted(ctx.invoked_subcommand)) from None


def _interrupted(command: str | None) -> str:
    """What to say of a command that was interrupted with nothing to save, or at once."""
    if command in RESUMING:
        return "interrupted; the same command resumes"
    if command in LISTENING:
        return "interrupted"
    return "interrupted; the same command begins anew"


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


begin_if_asked()
for command in COMMANDS:
    app.command()(command)
for group in GROUPS:
    app.add_typer(group)


if __name__ == "__main__":
    sys.exit(app())
