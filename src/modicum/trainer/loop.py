"""The trainer: from a plan to a finished run folder.

Killed at any moment, the same command resumes from the newest checkpoint, and the losses are those
of a run that was never killed: what a step does depends on the checkpointed state and the step's
number alone. On several ranks every one runs this loop; rank 0 has the folder, and what one of them
alone can know (a signal, the time) is agreed on once an update.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from modicum.checkpoint import CheckpointStore
from modicum.core.clock import EXPORT, TRACKING
from modicum.core.errors import InputError, Interrupted
from modicum.core.progress import Listener
from modicum.core.ranks.ranks import Ranks, peer_errors
from modicum.core.units import Every
from modicum.data.row_stream import BrokenStream
from modicum.planner import Plan
from modicum.planner.auto_exchange import FIELD as EXCHANGE
from modicum.planner.question import map_as
from modicum.recipe import Recipe
from modicum.recipe.auto_exchange import AUTO
from modicum.trainer.accounts import revise_by_shares, revise_plan, start_meter, stop_meter
from modicum.trainer.best import has_stalled, keep_if_best, note_best, take_best
from modicum.trainer.ended import note_ended
from modicum.trainer.exporting import export
from modicum.trainer.folder import PLAN, RunFolder
from modicum.trainer.hub_weights import with_weights
from modicum.trainer.looking import evaluate_now, evaluate_test, write_samples
from modicum.trainer.rank_agreement import same_folder, same_model, same_setup
from modicum.trainer.rank_watch import watched_run
from modicum.trainer.record import RunRecord
from modicum.trainer.save_cost import learn_save_cost
from modicum.trainer.session import Session
from modicum.trainer.setup import begin, more_than
from modicum.trainer.stop import StopRequested, StopSignals
from modicum.trainer.surgery import operate_if_asked
from modicum.trainer.tracking import followed, package

# The plan is revised once the speed is known.
REVISED_AFTER = 5


def train(
    plan: Plan,
    out: str | Path,
    *,
    listener: Listener = lambda event: None,
    fork: str | Path | None = None,
    restart: bool = False,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Run a plan in the folder `out`, or resume where an interrupted run of it stopped.

    Args:
        plan: from `modicum.plan`.
        out: the run folder; made if it is not there. Ranks on several hosts need one that all see.
        listener: is called with every event, as `docs/reference/run-folder.md` lists them.
        fork: a run folder whose newest checkpoint a *new* run starts from.
        restart: begin anew and replace the run of this recipe that is there; the listener is
            called with what that replaces.
        ranks: this process among those that were joined (`core.ranks.ranks.joined`), each of which
            calls this with the same plan.

    Returns:
        The content of `run.json`, on rank 0.

    Raises:
        InputError: the folder is in use, holds another run or other files, or a rank does not see
            it; the data is wrong; a rank has another recipe, code or model; training diverged; the
            disk is full.
        Interrupted: SIGTERM or Ctrl-C on any rank; the state is saved, and the same call resumes.
        PeerLost: another rank is gone.
        DamagedMessage: something else came than a rank on another host sent.
    """
    map_as(plan.recipe, plan.device)
    ranks = ranks or Ranks()
    ranks.receipts.begin(ranks.local_size < ranks.size)  # within a host nothing goes over a cable
    folder = RunFolder.of(Path(out), ranks)
    with ExitStack() as stack:
        stack.enter_context(peer_errors())
        signals = stack.enter_context(StopSignals())
        plan = with_weights(plan, ranks)
        plan.task.check_weights(plan.inputs)
        for kind in plan.recipe.tracking.to:
            package(kind)
        same_setup(plan.recipe, ranks)
        same_model(plan.inputs.model_folder, ranks)
        stack.enter_context(folder.locked())
        same_folder(folder.path, ranks)
        origin = None if fork is None else os.path.realpath(fork)
        begun = ranks.first and _enter(folder, plan, origin, listener if restart else None)
        begun = ranks.broadcast(begun)
        stack.callback(ranks.clock.restart)  # the next run in this process has its own
        record = RunRecord.open(folder, plan, origin, clock=ranks.clock)
        if begun and ranks.first:
            _check_fork(record, origin, folder)
        if ranks.broadcast(ranks.first and begun and _has_finished(record, folder, plan.recipe)):
            return record.content
        if ranks.first and begun and record.finished:
            _check_extends(folder)
        if begun:
            plan = plan.replaying(ranks.broadcast(folder.rows(PLAN)))
        try:
            with (
                record.running(),
                watched_run(plan, folder.path, ranks) as watched,
                peer_errors(),
            ):
                folder.write_recipe(plan.recipe)
                written = folder.rows(PLAN)
                if not written or plan.revision > written[-1]["revision"]:
                    folder.append(PLAN, plan.row())
                kinds = plan.recipe.tracking.to if ranks.first else ()
                with followed(plan.recipe, folder.path, listener, kinds) as heard:
                    heard({"event": "plan", **plan.row()})
                    with watched.marked():
                        session = begin(plan, folder, heard, signals, record, ranks, watched)
                        record.begun(ranks)
                    run(session)
                    with ranks.clock(EXPORT), watched.marked():
                        step = take_best(session)
                    evaluate_test(session, step)
                    with ranks.clock(EXPORT), watched.marked():
                        outputs = export(session)
        except StopRequested as stop:
            record.interrupted()
            problem = f"{stop}; the state is saved, and the same command resumes"
            raise Interrupted(problem) from None
        session.waits.settle()
        content = record.finish(outputs, ranks)
        listener({"event": "finished", **content, "folder": str(folder.path)})
        return content


def run(session: Session) -> None:
    """Every step that is left; a request to stop is honoured after saving.

    Raises:
        StopRequested: a signal came to some rank, and the state is saved.
        InputError: training diverged, the disk is full, or streamed data cannot be read on, which
            comes after the state is saved.
    """
    try:
        with session.wire, session.link_check:
            _run(session)
    except (StopRequested, BrokenStream):
        session.save(last=True)
        session.settle()
        raise
    finally:
        session.meter.stop()
        session.store.leave()


def _run(session: Session) -> None:
    recipe, last = session.plan.recipe, session.plan.steps
    evaluating = Every.parse(recipe.evaluation.every)
    if session.step == 0:
        write_samples(session)
    if session.step == 0 or evaluating.due(session.step, 0.0):
        evaluate_now(session)  # the process before this one may not have come to it
        keep_if_best(session)
    last_save = last_evaluation = time.monotonic()
    first = session.step
    with session.clock(TRACKING):
        start_meter(session)
    while session.step < last:
        now, begun = time.monotonic(), session.step > first
        update = session.agree(
            evaluate=begun and evaluating.due(session.step, now - last_evaluation),
            save=begun and session.plan.saving.due(session.step, now - last_save),
        )
        if update.evaluate:
            evaluate_now(session)
            keep_if_best(session)
            last_evaluation = time.monotonic()
        if has_stalled(session):
            break
        if update.save:
            session.save()
            learn_save_cost(session)
            last_save = time.monotonic()
        session.train_one(update)
        with session.clock(TRACKING):
            if session.step in (session.metered_until, last):
                revise_by_shares(session)
                stop_meter(session)
            if session.step - first == REVISED_AFTER:
                revise_plan(session, f"speed measured over {REVISED_AFTER} steps")
            note_ended(session)
            session.tell_of_link()
        session.wire.write()
        operate_if_asked(session)
    evaluate_now(session)
    keep_if_best(session)
    note_best(session)
    write_samples(session)
    session.save(last=True)
    session.settle()


def _enter(folder: RunFolder, plan: Plan, origin: str | None, replacing: Listener | None) -> bool:
    """Look at what the folder holds before anything is written; whether a run resumes there.

    Args:
        replacing: where a run that is there makes room for another; is called with what goes.
    """
    folder.refuse_strangers()
    replaces = replacing is not None and folder.started()
    if not replaces and not folder.may_begin(plan.recipe):
        return True
    if replaces:
        _check_restart(folder, plan, origin)
    if origin is not None:
        _check_origin(Path(origin), plan.recipe)
    if replacing is not None and replaces:
        message = "begins anew and replaces what this run had here: "
        held = ", ".join(folder.held()) or "no step"
        replacing({"event": "warning", "message": message + held})
    folder.clear()
    return False


def _check_restart(folder: RunFolder, plan: Plan, origin: str | None) -> None:
    left_open = any(row["field"] == EXCHANGE for row in plan.choices)
    folder.check_same(plan.recipe.changed(comm={"method": AUTO}) if left_open else plan.recipe)
    forked_from = folder.read_record().get("forked_from")
    if forked_from is not None and forked_from != origin:
        raise InputError(
            "this run began as a fork, so to begin it anew give --fork as well, or another --out",
            file=folder.path,
            field="--fork",
            allowed=str(forked_from),
        )


def _check_extends(folder: RunFolder) -> None:
    """Refuse more steps of a run that has lost its state."""
    if not CheckpointStore(folder.path / "checkpoints").steps():
        raise InputError(
            "this run has finished, and its checkpoints are gone, so it cannot be extended; put "
            "one back, or begin anew at step 1 with --restart",
            file=folder.path,
        )


def _has_finished(record: RunRecord, folder: RunFolder, recipe: Recipe) -> bool:
    """Whether nothing is left to do; refuses another recipe, whatever the run's state."""
    return not folder.check_same(recipe) and record.finished


def _check_fork(record: RunRecord, origin: str | None, folder: RunFolder) -> None:
    if origin is not None and record.content["forked_from"] != origin:
        problem = "a fork starts a new run, and here is another one already"
        raise InputError(problem, file=folder.path)


def _check_origin(origin: Path, recipe: Recipe) -> None:
    """Look at the run to fork before anything is written."""
    steps = CheckpointStore(origin / "checkpoints").steps()
    if not steps:
        raise InputError("holds no checkpoint to start from", file=origin, field="--fork")
    if recipe.training.steps is not None:
        more_than(steps[-1], recipe.training.steps, "training.steps", recipe.training.steps)
