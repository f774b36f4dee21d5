"""What `modicum train` does: alone, as the supervisor of ranks, or as one of them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modicum import recipe_yaml, report
from modicum.cli.places import check_folder
from modicum.core.clock import IMPORTS, PLANNING, Clock
from modicum.core.errors import InputError, ModicumError
from modicum.parallel.rank_environment import RankPlace, place, started_again, started_elsewhere
from modicum.trainer.folder import RunFolder

if TYPE_CHECKING:
    from modicum.cli.live import Mode
    from modicum.recipe import Recipe

WATCHDOG = "c4"  # of several ranks, where the recipe names none and does not say null


@dataclass(frozen=True)
class Asked:
    """What the user asked for, as the command line has it."""

    recipe: str
    overrides: tuple[str, ...] = ()
    out: Path | None = None
    fork: Path | None = None
    mode: Mode = "auto"
    as_json: bool = False
    ranks: int | None = None
    restart: bool = False

    @property
    def folder(self) -> Path:
        """The run folder: `--out`, or one named after the recipe."""
        return self.out or Path("runs") / recipe_yaml.locate(self.recipe).stem

    @property
    def talks(self) -> bool:
        """Whether sentences are wanted on standard output."""
        return not self.as_json and self.mode not in ("quiet", "json")

    def command(self) -> list[str]:
        """The same for a rank: without `--ranks`, and without what is said at the end."""
        command = ["train", "--out", str(self.folder), "--progress", self.mode]
        for override in self.overrides:
            command += ["--set", override]
        if self.fork is not None:
            command += ["--fork", str(self.fork)]
        if self.restart:
            command += ["--restart"]
        return [*command, "--", self.recipe]


def train(asked: Asked) -> None:
    """Run a recipe, or leave a finished run as it is; then say where the report is.

    Raises:
        ModicumError: what is wrong, or in the way.
        typer.Exit: ranks ended badly, and why has been said.
    """
    here = placed(asked)
    folder = asked.folder
    if not os.path.lexists(folder):  # else the run itself sees what is there
        check_folder(folder, "--out")
    told = _recipe(asked)
    speaks = here.first and not here.supervised
    restart = asked.restart and not started_again()
    if asked.fork is None and not restart and RunFolder(folder).has_finished(told):
        if asked.talks and speaks:
            print(f"{folder} has finished already and is left as it is", file=sys.stderr)
        if speaks and not (folder / "report.html").exists():
            report.write(folder)
    elif asked.ranks is not None and asked.ranks > 1:
        _run_ranks(asked, asked.ranks)
    else:
        with recipe_yaml.places(asked.recipe, asked.overrides):
            _run(told, asked, here, restart)
    if not speaks:
        return
    if asked.as_json:
        from modicum.cli.tables import print_json

        print_json(report.summary(folder))
    elif asked.talks:
        print(f"report: {folder / 'report.html'}")


def show_plan(asked: Asked, folder: Path | None) -> None:
    """The plan of a new run or, with a folder, of the run there that the recipe continues."""
    from modicum.cli.tables import print_json, print_plan

    here = placed(asked)
    if folder is not None and not os.path.lexists(folder):
        check_folder(folder, "--out")
    told = _recipe(asked) if folder is not None else recipe_yaml.load(asked.recipe, asked.overrides)
    with recipe_yaml.places(asked.recipe, asked.overrides):
        row = _plan(told, folder, asked.ranks or here.size).row()
    if not here.first:
        return
    if asked.as_json:
        print_json(row)
    else:
        print_plan(row)


def _recipe(asked: Asked) -> Recipe:
    """The recipe; a run that is there resumes with the paths of where it was begun."""
    where = Path.cwd() if asked.restart else RunFolder(asked.folder).directory()
    return recipe_yaml.load(asked.recipe, asked.overrides, where)


def _plan(recipe: Recipe, folder: Path | None, ranks: int) -> Any:
    """The plan for so many ranks, none of which is there yet."""
    from modicum.planner import plan
    from modicum.trainer import continued

    return plan(recipe, ranks=ranks) if folder is None else continued(recipe, folder, ranks=ranks)


def placed(asked: Asked) -> RankPlace:
    """This process's place among ranks.

    Raises:
        InputError: it is a rank already, and asked to start some.
    """
    if asked.ranks is not None and started_elsewhere():
        raise InputError(
            "the environment says that this process is a rank already (RANK is set, as torchrun "
            "does); leave --ranks out there",
            field="--ranks",
            value=asked.ranks,
        )
    return place()


def _run(recipe: Recipe, asked: Asked, here: RankPlace, restart: bool) -> None:
    """Train in this process, as one of the ranks or alone, and write the report of what came of it.

    Ranks meet first: what is planned depends on all of them. They watch each other, unless the
    recipe says something else.

    Args:
        restart: whether a run that is there makes room; not so for ranks that were started again.
    """
    clock = Clock.of_process()
    with clock(IMPORTS):
        from modicum.cli.live import listener
        from modicum.cli.live_events import EventListener
        from modicum.core.machine import pick_device
        from modicum.core.ranks.ranks import joined
        from modicum.trainer import continued, train
        from modicum.trainer.rank_watch import watched_start

    folder = asked.folder
    if here.size > 1 and "watchdog" not in recipe.model_fields_set:
        recipe = recipe.changed(watchdog={"method": WATCHDOG})
    try:
        with (
            joined(pick_device(recipe.training.device).type, clock) as ranks,
            watched_start(recipe, folder, ranks) as watched,
        ):
            with clock(PLANNING), watched.marked():
                plan = continued(recipe, folder, ranks=ranks, restart=restart)
            # Rank 0 shows progress; the others hear of it and say nothing.
            with listener(asked.mode) if here.first else EventListener(sys.stderr) as tell:
                train(plan, folder, listener=tell, fork=asked.fork, restart=restart, ranks=ranks)
    except ModicumError:
        if here.first and not here.supervised:
            _report_anyway(folder)
        raise
    if here.first and not here.supervised:
        report.write(folder)


def _run_ranks(asked: Asked, ranks: int) -> None:
    """Train in ranks on this machine, and write the report of what came of it.

    Raises:
        typer.Exit: with the exit code, when they ended badly.
    """
    from modicum.core.cores import usable_cores
    from modicum.parallel.launch import Supervisor

    if ranks > (cores := usable_cores()):
        print(f"warning: {ranks} ranks share {cores} cores", file=sys.stderr)
    # `-m` looks into the current folder first, where a file may have any module's name.
    where = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    code = Supervisor([sys.executable, *where, "-m", "modicum", *asked.command()], ranks).run()
    if code:
        _report_anyway(asked.folder)
        raise typer.Exit(code)
    report.write(asked.folder)


def _report_anyway(folder: Path) -> None:
    """The report of a run that was begun and not finished."""
    with suppress(ModicumError, OSError):  # what stopped the run is what must be reported
        if RunFolder(folder).read_record().get("status") in ("interrupted", "failed"):
            report.write(folder)
