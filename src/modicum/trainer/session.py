"""One process's part of a run: everything that the loop works on, and what can be done with it."""

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
from modicum.core.errors import InputError
from modicum.core.events import Events
from modicum.core.memory import TensorMeter, bytes_by_kind, release, used_bytes
from modicum.core.state import StateRegistry, optimizer_state, random_state, trained_state
from modicum.models import huggingface
from modicum.models.llama import Llama
from modicum.planner import Plan
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


@dataclass
class Session:
    """The things of a run, and the things done with them; `step` updates are done so far."""

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
        """Tell the listener of an event."""
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

    # Accounts

    def start_meter(self) -> None:
        """Start the meter, and note what persists while gradients are there."""
        self.meter.start(sum(bytes_by_kind(self.model, self.optimizer).values()))

        def note(step: int) -> None:
            if self.meter.running:
                self.record.content["measured_by_kind"] = bytes_by_kind(self.model, self.optimizer)

        self.step_program.events.on("before_optimizer", note)

    def stop_meter(self) -> None:
        """Record the meter's peak, if it is on and an update was done."""
        if self.meter.running:
            self.record.metered(self.meter.stop())

    def revise_plan(self, why: str) -> None:
        """A revision of the plan, with the speed that was measured."""
        measured = self.record.recent_positions_per_second(self.plan.tokens_per_update)
        self.plan = self.plan.revised(why, measured)
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


def begin(
    plan: Plan,
    folder: RunFolder,
    listener: Listener,
    signals: StopSignals,
    record: Record,
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
    session = Session(
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


def _finite(value: float) -> float | None:
    """The value, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None
