"""The trainer: from a plan to a finished run folder.

Killed at any moment, the same command goes on from the newest checkpoint, and the losses are those
of a run that was never killed: what a step does depends on the checkpointed state and the step's
number alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from modicum.checkpoint import CheckpointStore
from modicum.core.errors import InputError, Interrupted
from modicum.core.units import Every
from modicum.planner import Plan
from modicum.recipe import Recipe
from modicum.trainer.folder import PLAN, RunFolder
from modicum.trainer.record import Record
from modicum.trainer.session import Listener, Session, begin
from modicum.trainer.stop import StopRequested, StopSignals

# The meter of tensor bytes covers this many updates: by then every tensor that a step needs has
# been there once.
METERED_STEPS = 2
# The plan is revised once the speed is known.
REVISED_AFTER = 5


def train(
    plan: Plan,
    out: str | Path,
    *,
    listener: Listener = lambda event: None,
    fork: str | Path | None = None,
) -> dict[str, Any]:
    """Run a plan in the folder `out`, or go on where an interrupted run of it stopped.

    Args:
        plan: from `modicum.plan`.
        out: the run folder; made if it is not there.
        listener: is told of every event, as `docs/reference/run-folder.md` lists them.
        fork: a run folder whose newest checkpoint a *new* run starts from.

    Returns:
        The content of `run.json`.

    Raises:
        InputError: the folder is in use, holds another run or other files; the data is wrong;
            training diverged; the disk is full.
        Interrupted: SIGTERM or Ctrl-C; the state is saved, and the same call goes on.
    """
    folder = RunFolder(Path(out))
    with StopSignals() as signals, folder.locked():
        folder.refuse_strangers()
        begun = not folder.may_begin(plan.recipe)
        if not begun:
            folder.clear()
        origin = None if fork is None else str(Path(fork).resolve())
        if origin is not None and not begun:
            _check_origin(Path(origin), plan.recipe)
        record = Record.open(folder, plan, origin)
        if begun:
            if origin is not None and record.content["forked_from"] != origin:
                problem = "a fork starts a new run, and here is another one already"
                raise InputError(problem, file=folder.path)
            if not folder.check_same(plan.recipe) and record.finished:
                return record.content
            plan = plan.replaying(folder.rows(PLAN))
        try:
            with record.running():
                folder.write_recipe(plan.recipe)
                if not folder.rows(PLAN):
                    folder.append(PLAN, plan.row())
                listener({"event": "plan", **plan.row()})
                session = begin(plan, folder, listener, signals, record)
                run(session)
                outputs = session.export()
        except StopRequested as stop:
            record.interrupted()
            raise Interrupted(
                f"stopped by {stop}; the state is saved, and the same command goes on"
            ) from None
        content = record.finish(outputs)
        listener({"event": "finished", **content, "folder": str(folder.path)})
        return content


def run(session: Session) -> None:
    """Every step that is left; a request to stop is honoured after saving.

    Raises:
        StopRequested: a signal came, and the state is saved.
        InputError: training diverged, or the disk is full.
    """
    try:
        _run(session)
    except StopRequested:
        session.save()
        raise
    finally:
        session.meter.stop()


def _run(session: Session) -> None:
    recipe = session.plan.recipe
    last = recipe.training.steps
    saving = Every.parse(recipe.checkpoint.every)
    evaluating = Every.parse(recipe.evaluation.every)
    if session.step == 0:
        session.write_samples()
    if session.step == 0 or evaluating.due(session.step, 0.0):
        session.evaluate()  # the process before this one may not have come to it
    last_save = last_evaluation = time.monotonic()
    first = session.step
    session.start_meter()
    while session.step < last:
        session.signals.check()
        session.train_one()
        done, now = session.step - first, time.monotonic()
        if done == METERED_STEPS or session.step == last:
            session.stop_meter()
        if done == REVISED_AFTER:
            session.revise_plan(f"speed measured over {REVISED_AFTER} steps")
        if evaluating.due(session.step, now - last_evaluation):
            session.evaluate()
            last_evaluation = time.monotonic()
        if saving.due(session.step, now - last_save) and session.step < last:
            session.save()
            last_save = time.monotonic()
    session.evaluate()
    session.write_samples()
    session.save()


def _check_origin(origin: Path, recipe: Recipe) -> None:
    """Look at the run to fork before anything is written."""
    steps = CheckpointStore(origin / "checkpoints").steps()
    if not steps:
        raise InputError("holds no checkpoint to start from", file=origin, field="--fork")
    if steps[-1] >= recipe.training.steps:
        raise InputError(
            f"the run to fork has done {steps[-1]} steps already; ask for more",
            field="training.steps",
            value=recipe.training.steps,
        )
