"""The beginning of a run's process: everything is built, and the newest checkpoint taken up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modicum.adapters.preparation import Preparation
from modicum.checkpoint import Checkpoint, CheckpointStore, Damaged
from modicum.comm.watching import Watch
from modicum.core.clock import BUILDING, PREPARING, TRIALS
from modicum.core.contracts.state import View
from modicum.core.errors import InputError
from modicum.core.machine.memory import TensorMeter, release
from modicum.core.progress import Listener
from modicum.core.random import derive_seed
from modicum.core.ranks.ranks import Ranks
from modicum.data.fitting import too_long_words
from modicum.planner import Plan
from modicum.planner.prediction import Prediction
from modicum.tasks import Data
from modicum.trainer.assembly import assemble
from modicum.trainer.beginnings import note_beginning
from modicum.trainer.best import check_asked, store_best
from modicum.trainer.build import same_inputs
from modicum.trainer.compressing import with_base_compressed
from modicum.trainer.folder import (
    BASE,
    EVALUATIONS,
    METRICS,
    PLAN,
    PREPARED,
    SAMPLES,
    START,
    RunFolder,
    ended_at,
    operated_at,
)
from modicum.trainer.preparing import adapter_prepared
from modicum.trainer.record import RunRecord
from modicum.trainer.session import Session
from modicum.trainer.start import adapter_start
from modicum.trainer.stop import StopSignals
from modicum.trainer.surgery import with_surgery
from modicum.trainer.warm_up import rehearse_run, with_compile_decided


def begin(
    plan: Plan,
    folder: RunFolder,
    listener: Listener,
    signals: StopSignals,
    record: RunRecord,
    ranks: Ranks,
    watched: Watch | None = None,
) -> Session:
    """Build everything, in an order in which each step sees what the one before changed.

    Takes up the newest checkpoint, if there is one, and forgets rows of later steps.

    Raises:
        InputError: the data is wrong or has changed; a checkpoint is of another run.
        StopRequested: a signal came.
    """

    def progress(name: str, done: int, total: int | None) -> None:
        signals.check()
        listener({"event": "phase", "name": name, "done": done, "total": total})

    with ranks.clock(PREPARING):
        folder.take_offered()
        data = plan.task.prepare(plan.recipe, plan.inputs, folder.path, progress, ranks)
    check_asked(plan, data, ranks)
    release()
    plan = _counted(plan, data, folder, ranks)
    record.counted(plan)
    if any(data.counts.get(key) for key in ("truncated", "shortened", "dropped")):
        counts, length = data.counts, plan.recipe.data.sequence_length
        examples = counts.get("documents", counts["rows"])
        message = f"of {examples:,} examples, with rows of {length} tokens: "
        listener({"event": "warning", "message": message + too_long_words(counts)})
    progress("building", 0, None)
    with ranks.clock(TRIALS), signals.at_once():
        plan, decision = with_compile_decided(plan, data, ranks)
    if decision is not None:
        folder.append(PLAN, plan.row())
        listener({"event": "compile", "message": decision.told})
    store = CheckpointStore(
        folder.path / "checkpoints",
        keep=plan.recipe.checkpoint.keep,
        ranks=ranks,
        asynchronous=plan.prediction.choice.asynchronous,
    )

    def warn(message: str) -> None:
        listener({"event": "warning", "message": message})

    origin = ranks.broadcast(record.content["forked_from"])
    found, forked = _newest(store, origin, ranks, warn)
    if forked and found is not None:
        more_than(found.step, plan.steps, *plan.recipe.training.length)
    torch.manual_seed(_first_seed(plan.recipe.training.seed, ranks))
    inputs = View("inputs", *same_inputs(data, plan.inputs.model_folder))
    bound = plan.prediction
    plan = with_base_compressed(plan, data, folder.path / BASE, ranks, progress)
    plan = _as_found(plan, bound, "the layers' spectra are known", folder, record, ranks)
    if found is not None:
        plan = _as_it_was(plan, found.step, folder, origin if forked else None, ranks)
        if plan.surgeries:
            record.reshaped(plan.row())
    kept = None if found is None else found.state["model"]
    before = Path(origin) / PREPARED if forked and origin is not None else None
    own = folder.path / PREPARED
    prepared = adapter_prepared(plan, data, own, ranks, progress, forked_from=before)
    plan = _as_prepared(plan, prepared, folder, record, ranks)
    start = adapter_start(plan, folder.path / START, ranks)
    moved = {name for surgery in plan.surgeries for name in surgery.rows}
    with ranks.clock(BUILDING):
        built = assemble(
            plan, data, ranks, inputs, kept=kept, skip=moved, prepared=prepared, start=start
        )
    session = Session(
        ranks, plan, folder, listener, signals, record, data, built, store,
        TensorMeter(plan.device), watched=watched or Watch(None),
    )  # fmt: skip
    if found is not None:
        with ranks.clock(BUILDING):
            session.take_up(found, fork=forked)
    _forget_what_came_after(session, {} if found is None or forked else found.notes)
    note_beginning(session)
    progress("rehearsing the largest batch", 0, None)
    with ranks.clock(TRIALS):
        rehearse_run(session)
    return session


def _counted(plan: Plan, data: Data[Any], folder: RunFolder, ranks: Ranks) -> Plan:
    """The plan with the rows that there are; a revision where that is another number of steps."""
    counted = plan.counted(data.counts)
    if plan.recipe.training.epochs is None:
        return counted
    rows = ranks.broadcast(folder.rows(PLAN))
    if rows and rows[-1].get("steps") == counted.steps:
        return counted
    counted = counted.because(f"the data is prepared: {counted.counts['rows']:,} rows")
    folder.append(PLAN, counted.row())
    return counted


def _as_prepared(
    plan: Plan, prepared: Preparation | None, folder: RunFolder, record: RunRecord, ranks: Ranks
) -> Plan:
    """The plan with the sizes that data decided; a revision where they are not the bound."""
    if prepared is None or not any(prepared.values.values()):
        return plan
    made = plan.with_prepared(prepared.values)
    return _as_found(made, plan.prediction, "the adapter has looked at data", folder, record, ranks)


def _as_found(
    plan: Plan, bound: Prediction, why: str, folder: RunFolder, record: RunRecord, ranks: Ranks
) -> Plan:
    """The plan, of a new revision where what was found is not what it was bound by.

    Its forecast is what the record has next to the measured peaks.
    """
    now = plan.prediction
    if (now.trainable, now.peak_bytes) == (bound.trainable, bound.peak_bytes):
        return plan
    record.forecast(plan.row())
    rows = ranks.broadcast(folder.rows(PLAN))
    if rows and rows[-1]["parameters"] == {"total": now.total, "trainable": now.trainable}:
        return plan
    found = f"{now.trainable:,} trained parameters of at most {bound.trainable:,}"
    if now.trainable == bound.trainable:
        found = f"{now.total:,} parameters, where {bound.total:,} were planned"
    plan = plan.because(f"{why}: {found}")
    folder.append(PLAN, plan.row())
    return plan


def more_than(done: int, steps: int, field: str, asked: float) -> None:
    """Refuse to fork a run that has done as many steps as are asked for.

    Raises:
        InputError: so it has.
    """
    if done >= steps:
        problem = f"the run to fork has done {done} steps already; ask for more"
        raise InputError(problem, field=field, value=asked)


def _newest(
    store: CheckpointStore, origin: str | None, ranks: Ranks, warn: Callable[[str], None]
) -> tuple[Checkpoint | None, bool]:
    """The run's newest checkpoint, or that of the run to fork, and whether it is the latter.

    Raises:
        InputError: the run has damaged ones alone; or the run to fork has no complete one.
    """
    try:
        found = store.newest(warn)
    except Damaged as error:
        raise InputError(
            f"{error.problem}; put one back as it was, or begin anew at step 1 with --restart, "
            "which replaces this run's metrics and checkpoints",
            file=store.folder,
        ) from None
    if found is not None or origin is None:
        return found, False
    found = CheckpointStore(Path(origin) / "checkpoints", ranks=ranks).newest(warn)
    if found is None:
        problem = "holds no complete checkpoint to start from"
        raise InputError(problem, file=origin, field="--fork")
    return found, True


def _as_it_was(plan: Plan, step: int, folder: RunFolder, origin: str | None, ranks: Ranks) -> Plan:
    """The plan by what had changed up to a checkpoint's step; a fork takes over its origin's.

    That are surgeries, and methods that have ended for good.

    Raises:
        InputError: a row of plan.jsonl is not as a run writes it.
    """
    rows = own = folder.rows(PLAN)
    if origin is not None and ranks.first:
        rows = RunFolder(Path(origin)).rows(PLAN)
    done = ranks.broadcast([row["surgery"] for row in rows if 0 <= operated_at(row) <= step])
    known = ranks.broadcast([operated_at(row) for row in own])
    for surgery in done:
        made = with_surgery(plan, surgery, origin or folder.path)
        if surgery["step"] not in known:
            made = replace(made, revision=plan.revision + 1, why=f"forked after {surgery['why']}")
            folder.append(PLAN, made.row() | {"surgery": surgery})
        plan = made
    ended = ranks.broadcast([row["ended"] for row in rows if 0 <= ended_at(row) <= step])
    known = ranks.broadcast([ended_at(row) for row in own])
    for end in ended:
        plan = plan.without(str(end.get("section")))
        if end["step"] not in known:
            why = f"forked after step {end['step']}: {end.get('why')}"
            plan = replace(plan, revision=plan.revision + 1, why=why)
            folder.append(PLAN, plan.row() | {"ended": end})
    return plan


def _forget_what_came_after(session: Session, notes: Mapping[str, Any]) -> None:
    """Remove rows and checkpoints of later steps, and see which rows there are.

    Args:
        notes: of the run's own checkpoint; empty where there is none.
    """
    ranks, folder, record = session.ranks, session.folder, session.record
    if session.step:
        session.emit("resumed", step=session.step)
    done = folder.rows(METRICS)
    record.resumes_from(session.step, notes, done)
    if ranks.first:
        session.store.forget_after(session.step)
        folder.cut_back(session.step)
    evaluations = folder.rows(EVALUATIONS)
    session.evaluations = ranks.broadcast(evaluations)
    session.evaluated = {row["step"] for row in session.evaluations}
    store_best(session)
    session.sampled = set(ranks.broadcast([row["step"] for row in folder.rows(SAMPLES)]))
    metrics = [row for row in done if row["step"] <= session.step]
    skipped = [bool(row.get("skipped")) for row in metrics]
    session.updated = ranks.broadcast(not all(skipped))
    session.skipped_in_a_row = ranks.broadcast([*skipped[::-1], False].index(False))
    record.resume(metrics, evaluations)


def _first_seed(seed: int, ranks: Ranks) -> int:
    """What torch's generators start from: other dropout on every rank."""
    return seed if ranks.first else derive_seed(seed, f"rank {ranks.rank}")
