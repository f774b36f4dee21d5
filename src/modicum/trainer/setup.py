"""The beginning of a run's process: everything is built, and the newest checkpoint taken up."""

from __future__ import annotations

from pathlib import Path

import torch

from modicum.checkpoint import CheckpointStore
from modicum.core.events import Events
from modicum.core.memory import TensorMeter, release
from modicum.core.random import derive_seed
from modicum.core.ranks import Ranks
from modicum.core.state import StateRegistry, model_view, optimizer_view, random_view
from modicum.planner import Plan
from modicum.tasks import CausalLM
from modicum.trainer.build import (
    build_data,
    build_model,
    build_optimizer,
    build_strategy,
    build_tokenizer,
    same_inputs,
)
from modicum.trainer.folder import EVALUATIONS, METRICS, PLAN, SAMPLES, RunFolder
from modicum.trainer.record import Record
from modicum.trainer.session import Listener, Session
from modicum.trainer.step import StandardStep
from modicum.trainer.stop import StopSignals
from modicum.trainer.warm_up import is_compiled, rehearse_run, with_compile_decided


def begin(
    plan: Plan,
    folder: RunFolder,
    listener: Listener,
    signals: StopSignals,
    record: Record,
    ranks: Ranks,
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

    # Rank 0 writes the tokenizer and the tokens; the others find them written.
    tokenizer = ranks.first_alone(
        lambda: build_tokenizer(plan, folder.path, progress), signals.check
    )
    data = ranks.first_alone(
        lambda: build_data(plan, tokenizer, folder.path, progress), signals.check
    )
    release()
    progress("building", 0, None)
    with signals.at_once():
        plan, decision = with_compile_decided(plan, data, ranks)
    if decision is not None:
        folder.append(PLAN, plan.row())
        listener({"event": "compile", "message": decision.told})
    strategy = build_strategy(plan, ranks)
    recipe = plan.recipe
    torch.manual_seed(_first_seed(recipe.training.seed, ranks))
    model, adapter = build_model(plan, tokenizer, strategy, compiled=is_compiled(plan))
    release()
    model.train()
    optimizer = build_optimizer(plan, model)
    step = StandardStep(
        CausalLM(),
        model,
        optimizer,
        strategy,
        Events(),
        recipe.training.precision,
        recipe.training.clip_norm,
    )
    registry = StateRegistry()
    registry.add_view(model_view(model))
    registry.add_view(optimizer_view(optimizer))
    registry.add_view(random_view(recipe.training.seed, ranks))
    registry.add("inputs", *same_inputs(data, plan.inputs.model_folder))
    store = CheckpointStore(
        folder.path / "checkpoints",
        keep=recipe.checkpoint.keep,
        ranks=ranks,
        asynchronous=plan.prediction.choice.asynchronous,
    )
    session = Session(
        ranks, plan, folder, listener, signals, record, data, model, adapter, optimizer, step,
        registry, store, TensorMeter(plan.device),
    )  # fmt: skip
    _take_up(session)
    progress("rehearsing the largest batch", 0, None)
    rehearse_run(session)
    return session


def _take_up(session: Session) -> None:
    """Go on from the newest checkpoint, or that of the run to fork; forget what came after it."""
    ranks, folder, record = session.ranks, session.folder, session.record

    def warn(message: str) -> None:
        session.tell("warning", message=message)

    checkpoint = session.store.newest(warn)
    origin = ranks.tell(record.content["forked_from"])
    if checkpoint is not None:
        session.restore(checkpoint)
    elif origin is not None:
        session.fork(Path(origin), warn)
    if session.step:
        session.tell("resumed", step=session.step)
    if ranks.first:
        session.store.forget_after(session.step)
        folder.cut_back(session.step)
    evaluations = folder.rows(EVALUATIONS)
    session.evaluated = {row["step"] for row in ranks.tell(evaluations)}
    session.sampled = set(ranks.tell([row["step"] for row in folder.rows(SAMPLES)]))
    record.resume(folder.rows(METRICS), evaluations)


def _first_seed(seed: int, ranks: Ranks) -> int:
    """What torch's generators start from: other dropout on every rank."""
    return seed if ranks.first else derive_seed(seed, f"rank {ranks.rank}")
