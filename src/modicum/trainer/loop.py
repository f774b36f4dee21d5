"""The trainer: data, step, events, evaluations, checkpoints; from a plan to a finished run folder.

Killed at any moment, the same command goes on from the newest checkpoint, and the losses are those
of a run that was never killed: what a step does depends on the checkpointed state and the step's
number alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modicum.adapters import AttachedAdapter
from modicum.checkpoint import Checkpoint, CheckpointStore
from modicum.core.errors import InputError, Interrupted
from modicum.core.events import Events
from modicum.core.memory import TensorMeter, bytes_by_kind, release, used_bytes
from modicum.core.state import StateRegistry, optimizer_state, random_state, trained_state
from modicum.core.units import Every
from modicum.models import huggingface
from modicum.models.llama import Llama
from modicum.planner import Plan
from modicum.recipe import Recipe
from modicum.tasks import CausalLM
from modicum.trainer.build import (
    Data,
    build_data,
    build_model,
    build_optimizer,
    build_tokenizer,
    same_data,
)
from modicum.trainer.evaluate import evaluate, prompts, write_samples
from modicum.trainer.folder import EVALUATIONS, METRICS, PLAN, SAMPLES, RunFolder
from modicum.trainer.record import Record
from modicum.trainer.schedule import factor, set_learning_rate
from modicum.trainer.step import Outcome, StandardStep
from modicum.trainer.stop import StopRequested, StopSignals

Listener = Callable[[dict[str, Any]], None]
# The meter of tensor bytes covers this many updates: by then every tensor that a step needs has
# been there once.
METERED_STEPS = 2
# The plan is revised once the speed is known.
REVISED_AFTER = 5


@dataclass
class Session:
    """One process's part of a run: everything that the loop works on."""

    plan: Plan
    folder: RunFolder
    listener: Listener
    signals: StopSignals
    record: Record
    data: Data
    model: Llama
    adapter: AttachedAdapter | None
    optimizer: torch.optim.Optimizer
    step_program: StandardStep
    registry: StateRegistry
    store: CheckpointStore
    meter: TensorMeter
    step: int = 0
    skipped_in_a_row: int = 0

    def tell(self, event: str, **content: Any) -> None:
        self.listener({"event": event, **content})

    # One update

    def train_one(self) -> Outcome:
        """Update number `step + 1`, and its row in the metrics."""
        training, start = self.plan.recipe.training, time.perf_counter()
        rate = set_learning_rate(self.optimizer, factor(self.step, training))
        batch = self.data.train.batch(self.data.sampler.indices(self.step))
        generators = self.registry.views["random"]
        random_before = generators.read()
        try:
            outcome = self.step_program(
                self.step + 1,
                batch.split(self.plan.prediction.choice.micro_batch_size),
                self.signals.check,
            )
        except StopRequested:
            generators.write(random_before)  # the update did not happen
            raise
        self.step += 1
        seconds = time.perf_counter() - start
        row: dict[str, Any] = {
            "step": self.step,
            "loss": _finite(outcome.loss),
            "learning_rate": rate,
            "gradient_norm": _finite(outcome.gradient_norm),
            "tokens": outcome.tokens,
            "seconds": seconds,
            "tokens_per_second": outcome.tokens / seconds,
            "bytes": used_bytes(self.plan.device),
        }
        if outcome.skipped:
            row["skipped"] = True
        self.folder.append(METRICS, row)
        self.record.count(row)
        self.tell(
            "step", **row, steps=training.steps, seconds_left=self.record.seconds_left(self.step)
        )
        self._guard(outcome)
        return outcome

    def _guard(self, outcome: Outcome) -> None:
        """Let a few updates be skipped, then stop with the last good state on disk."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if outcome.skipped else 0
        if not outcome.skipped:
            return
        self.tell("warning", message=f"step {self.step}: loss or gradient not finite, skipped")
        limit = self.plan.recipe.training.skip_limit
        if self.skipped_in_a_row > limit:
            raise InputError(
                f"training diverged: {self.skipped_in_a_row} updates in a row had a loss or a "
                f"gradient that is not finite, up to step {self.step}; lower "
                "training.learning_rate or add training.warmup_steps (checkpoints before it are "
                "intact)",
                field="training.learning_rate",
                value=self.plan.recipe.training.learning_rate,
            )

    # Looking at the model

    def evaluate(self) -> None:
        """Validation loss now, as a row."""
        data = self.data.validation
        if data is None or any(r["step"] == self.step for r in self.folder.rows(EVALUATIONS)):
            return
        self.step_program.events.publish("before_evaluation", step=self.step)
        recipe = self.plan.recipe
        result = evaluate(
            self.step_program.task,
            self.model,
            data,
            rows=recipe.evaluation.rows,
            micro_batch_size=self.plan.prediction.choice.micro_batch_size,
            precision=recipe.training.precision,
            check=self.signals.check,
        )
        row = {"step": self.step, **result}
        self.folder.append(EVALUATIONS, row)
        self.record.evaluated(row)
        self.tell("evaluation", **row)

    def write_samples(self) -> None:
        """What the model writes now, as rows."""
        if any(row["step"] == self.step for row in self.folder.rows(SAMPLES)):
            return
        recipe = self.plan.recipe
        texts = prompts(recipe.samples, self.data.tokenizer, self.data.validation)
        samples = write_samples(
            self.model, self.data.tokenizer, recipe.samples, texts, seed=recipe.training.seed
        )
        rows = [{"step": self.step, **sample} for sample in samples]
        self.folder.append(SAMPLES, *rows)
        for row in rows:
            self.tell("sample", **row)

    # State

    def save(self) -> None:
        """A checkpoint of the state as it is after `step` updates."""
        if self.store.steps()[-1:] == [self.step]:
            return
        self.step_program.events.publish("before_checkpoint", step=self.step)
        start = time.perf_counter()
        path = self.store.save(self.step, self.registry.read(), notes=self.record.notes())
        self.tell("checkpoint", step=self.step, path=str(path), seconds=time.perf_counter() - start)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint's state."""
        try:
            self.registry.write(checkpoint.state)
        except InputError as error:
            raise error.located(file=checkpoint.folder) from None
        self.step = checkpoint.step

    def fork(self, origin: Path, warn: Callable[[str], None]) -> Checkpoint:
        """Make another run's newest checkpoint this run's first; its data may be other data."""
        found = CheckpointStore(origin / "checkpoints").newest(warn)
        if found is None:
            problem = "holds no whole checkpoint to start from"
            raise InputError(problem, file=origin, field="--fork")
        own = {"data": self.registry.views["data"].read()}
        self.store.save(found.step, {**found.state, **own}, notes={"forked_from": str(origin)})
        return self.store.read(found.step)

    # The run

    def run(self) -> None:
        """From `step` to the recipe's steps, and a checkpoint of the end."""
        recipe = self.plan.recipe
        saving = Every.parse(recipe.checkpoint.every)
        evaluating = Every.parse(recipe.evaluation.every)
        if self.step == 0:
            self.write_samples()
        if self.step == 0 or evaluating.due(self.step, 0.0):
            self.evaluate()  # the process before this one may not have come to it
        last_save = last_evaluation = time.monotonic()
        first = self.step
        self._meter_steps()
        while self.step < recipe.training.steps:
            self.signals.check()
            self.train_one()
            done, now = self.step - first, time.monotonic()
            if done == METERED_STEPS:
                self.record.metered(self.meter.stop())
            if done == REVISED_AFTER:
                self._revise()
            if evaluating.due(self.step, now - last_evaluation) or self._is_last():
                self.evaluate()
                last_evaluation = time.monotonic()
            if saving.due(self.step, now - last_save) and not self._is_last():
                self.save()
                last_save = time.monotonic()
        if self.meter.running and self.step > first:
            self.record.metered(self.meter.stop())
        self.evaluate()
        self.write_samples()
        self.save()

    def _meter_steps(self) -> None:
        """Start the meter, and note what persists while gradients are there."""
        self.meter.start(sum(bytes_by_kind(self.model, self.optimizer).values()))

        def note(step: int) -> None:
            if self.meter.running:
                self.record.content["measured_by_kind"] = bytes_by_kind(self.model, self.optimizer)

        self.step_program.events.on("before_optimizer", note)

    def _is_last(self) -> bool:
        return self.step == self.plan.recipe.training.steps

    def _revise(self) -> None:
        measured = self.record.recent_positions_per_second(self.plan.tokens_per_update)
        self.plan = self.plan.revised(f"speed measured over {REVISED_AFTER} steps", measured)
        self.folder.append(PLAN, self.plan.row())

    def export(self) -> dict[str, str]:
        """The trained weights where others read them: a PEFT folder, or a Hugging Face one."""
        self.tell("phase", name="exporting", done=0, total=None)
        if self.adapter is not None:
            base = str(self.plan.inputs.model_folder)
            self.adapter.save(self.folder.path / "adapter", base_model=base)
            return {"adapter": "adapter/"}
        files = sorted((self.folder.path / "tokenizer").glob("*"))
        huggingface.save(self.model, self.folder.path / "model", files=files)
        return {"model": "model/"}


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
                session = _session(plan, folder, listener, signals, record)
                session.run()
                outputs = session.export()
        except StopRequested as stop:
            record.interrupted()
            raise Interrupted(
                f"stopped by {stop}; the state is saved, and the same command goes on"
            ) from None
        content = record.finish(outputs)
        listener({"event": "finished", **content, "folder": str(folder.path)})
        return content


def _session(
    plan: Plan,
    folder: RunFolder,
    listener: Listener,
    signals: StopSignals,
    record: Record,
) -> _Saving:
    """Build everything, in an order in which each step sees what the one before changed."""

    def progress(name: str, done: int, total: int | None) -> None:
        signals.check()
        listener({"event": "phase", "name": name, "done": done, "total": total})

    recipe = plan.recipe
    tokenizer = build_tokenizer(plan, folder.path, progress)
    data = build_data(plan, tokenizer, folder.path, progress)
    release()
    progress("building", 0, None)
    torch.manual_seed(recipe.training.seed)
    model, adapter = build_model(plan, tokenizer)
    release()
    model.train()
    optimizer = build_optimizer(plan, model)
    events = Events()
    step = StandardStep(
        CausalLM(), model, optimizer, events, recipe.training.precision, recipe.training.clip_norm
    )
    registry = StateRegistry()
    registry.add("model", *trained_state(model))
    registry.add("optimizer", *optimizer_state(optimizer))
    registry.add("random", *random_state())
    registry.add("data", *same_data(data))
    store = CheckpointStore(folder.path / "checkpoints", keep=recipe.checkpoint.keep)
    session = _Saving(
        plan, folder, listener, signals, record, data, model, adapter, optimizer, step, registry,
        store, TensorMeter(plan.device),
    )  # fmt: skip

    def warn(message: str) -> None:
        session.tell("warning", message=message)

    checkpoint = store.newest(warn)
    if checkpoint is None and record.content["forked_from"] is not None:
        checkpoint = session.fork(Path(record.content["forked_from"]), warn)
    if checkpoint is not None:
        session.restore(checkpoint)
        session.tell("resumed", step=session.step)
    store.forget_after(session.step)
    folder.cut_back(session.step)
    record.resume(folder.rows(METRICS), folder.rows(EVALUATIONS))
    return session


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


def _finite(value: float) -> float | None:
    """The value, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


class _Saving(Session):
    """A session that saves before it gives way to a request to stop."""

    def run(self) -> None:
        try:
            super().run()
        except StopRequested:
            self.save()
            raise
        finally:
            self.meter.stop()
