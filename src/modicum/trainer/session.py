"""One process's part of a run: everything that the loop works on, and what can be done with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from modicum.adapters import AttachedAdapter
from modicum.checkpoint import Checkpoint, CheckpointStore
from modicum.comm.watching import Watch
from modicum.core.clock import CHECKPOINT, DATA, TRACKING, UPDATE
from modicum.core.contracts.state import StateRegistry
from modicum.core.contracts.step import StepOutcome, StepProgram
from modicum.core.errors import InputError, Interrupted, Restart
from modicum.core.machine.memory import TensorMeter, used_bytes
from modicum.core.progress import Listener
from modicum.core.ranks.ranks import Ranks
from modicum.data.rank_split import counted, micro_batches
from modicum.planner import Plan
from modicum.planner.choose import MICRO, refused, traits_of
from modicum.tasks import Data
from modicum.trainer.assembly import Built
from modicum.trainer.divergence import refuse_divergence
from modicum.trainer.folder import ANOMALIES, METRICS, PLAN, RunFolder
from modicum.trainer.forking import left_by_fork
from modicum.trainer.link_check import LinkCheck, slow_link_row
from modicum.trainer.out_of_memory import halved, ran_out
from modicum.trainer.rank_watch import AnomalyReader
from modicum.trainer.record import RunRecord
from modicum.trainer.schedule import factor
from modicum.trainer.stop import StopRequested, StopSignals
from modicum.trainer.time_account import Waits
from modicum.trainer.wire_account import WireAccount


@dataclass(frozen=True)
class Update:
    """What the ranks agreed on before an update: its rows, its trained tokens, what comes first."""

    rows: list[int]
    tokens: int
    evaluate: bool
    save: bool


@dataclass
class Session:
    """The things of a run, and the things done with them; `step` updates are done so far.

    `evaluations` are the rows of these, `evaluated` and `sampled` the steps that there are rows of,
    `saved` that of the newest checkpoint: rank 0 sent them to all, who else would see its files at
    different times. `stalled` is how long that checkpoint kept training waiting, in seconds,
    `save_costs` what it was each time, and `written` how long the newest took until it was in
    place, on rank 0. `updated` is whether any update of this run was not skipped. The meter is on
    up to the update `metered_until`. `watched` looks at the ranks. `clock` says where this
    process's time goes, `waits` what of it was waiting for other ranks, `wire` what rank 0 sends,
    `link_check` whether the link carries that as fast as the plan counts with.
    """

    ranks: Ranks
    plan: Plan
    folder: RunFolder
    listener: Listener
    signals: StopSignals
    record: RunRecord
    data: Data[Any]
    built: Built
    store: CheckpointStore
    meter: TensorMeter
    step: int = 0
    saved: int | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    evaluated: set[int] = field(default_factory=set)
    sampled: set[int] = field(default_factory=set)
    skipped_in_a_row: int = 0
    updated: bool = False
    stalled: float = 0.0
    written: float = 0.0
    save_costs: list[float] = field(default_factory=list)
    metered_until: int = 0
    watched: Watch = field(default_factory=lambda: Watch(None))

    def __post_init__(self) -> None:
        self.clock, self.waits = self.ranks.clock, Waits(self.ranks)
        self.wire = WireAccount(self.folder, self.ranks)
        self.link_check = LinkCheck(self.plan, self.ranks)
        self._data_before = 0.0
        self._anomalies = AnomalyReader(self.folder.path if self.ranks.first else None)

    @property
    def config(self) -> Any:
        """Of the model."""
        return self.built.config

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self.built.model

    @property
    def adapter(self) -> AttachedAdapter | None:
        """The model's adapter, if it has one."""
        return self.built.adapter

    @property
    def step_program(self) -> StepProgram:
        """What makes the updates."""
        return self.built.step_program

    @property
    def registry(self) -> StateRegistry:
        """The views of the run's state."""
        return self.built.registry

    def emit(self, event: str, **content: Any) -> None:
        """Tell the listener of an event."""
        self.listener({"event": event, **content})

    def check(self) -> None:
        """Leave here if any rank was asked to; all of them call this at the same places.

        Raises:
            StopRequested: a signal came to some rank.
        """
        # Only what was exchanged counts: a signal that comes after it is for the next time.
        if self.ranks.max(self.signals.requested is not None)[0]:
            raise StopRequested(self.signals.requested or "a signal to another rank")

    # One update

    def agree(self, *, evaluate: bool, save: bool) -> Update:
        """Add up what the ranks know of the next update; rank 0's clock says what comes before it.

        Raises:
            StopRequested: a signal came to some rank.
            InputError: a checkpoint could not be written.
            DamagedMessage: something else came than a rank sent.
        """
        self.tell_of_checkpoints()
        self._data_before = self.clock.total(DATA)
        with self.clock(DATA):
            rows = self.data.sampler.indices(self.step)
            mine = counted(self.data.train, rows, self.ranks)
        asked, first = self.signals.requested is not None, self.ranks.first
        held, sums = self.waits.mine(), self.ranks.receipts.mine()
        tokens, stop, evaluates, saves, *rest = self.ranks.sum(
            mine, asked, evaluate and first, save and first, *held, *sums
        )
        self.waits.take(rest[: len(held)])
        self.ranks.receipts.take(rest[len(held) :])
        if stop:
            raise StopRequested(self.signals.requested or "a signal to another rank")
        return Update(rows, round(tokens), bool(evaluates), bool(saves))

    def train_one(self, update: Update) -> StepOutcome:
        """Update number `step + 1`, and its row in the metrics."""
        training, start = self.plan.recipe.training, self.clock.seconds
        with self.clock(UPDATE), self.wire.update(self.step + 1), self.link_check.update():
            rate = self.step_program.set_rate(factor(self.step, training, self.plan.length))
            outcome = self._try(update)
        self.step += 1
        with self.clock(TRACKING):
            self._note(outcome, rate, self.clock.seconds - start)
        self._guard(outcome)
        epochs = self.data.sampler.epoch_of(self.step)
        if epochs > self.data.sampler.epoch_of(self.step - 1):
            self.step_program.hooks.epoch_end(epochs)
        return outcome

    def _note(self, outcome: StepOutcome, rate: float | None, seconds: float) -> None:
        """Write the row of the update that was just made, and tell of it."""
        row: dict[str, Any] = {
            "step": self.step,
            "loss": _finite(outcome.loss),
            "learning_rate": rate,
            "gradient_norm": _finite(outcome.gradient_norm),
            "tokens": outcome.tokens,
            "seconds": seconds,
            "data_seconds": self.clock.total(DATA) - self._data_before,
            "elapsed": self.record.time.seconds,
            "tokens_per_second": self.plan.tokens_per_update / seconds,
            "bytes": used_bytes(self.plan.device),
        }
        if outcome.extra_loss is not None:
            row["extra_loss"] = _finite(outcome.extra_loss)
        if outcome.skipped:
            row["skipped"] = True
        self.tell_of_anomalies()
        self.folder.append(METRICS, row)
        self.record.count(row)
        self.emit(
            "step", **row, steps=self.plan.steps, seconds_left=self.record.seconds_left(self.step)
        )

    def _try(self, update: Update) -> StepOutcome:
        """The update; in smaller micro-batches where memory runs out.

        Raises:
            StopRequested: between micro-batches; the update did not happen.
            Restart: memory ran out, and there are other ranks.
            Interrupted: memory ran out when weights, or what methods keep, were half new.
        """
        generators, program = self.registry.views["random"], self.step_program
        random_before = generators.read()
        outcomes: list[StepOutcome] = []

        def once() -> None:
            size = self.plan.prediction.choice.micro_batch_size
            with self.clock(DATA):
                batches = list(micro_batches(self.data.train, update.rows, size, self.ranks))
            outcomes.append(program(self.step + 1, batches, update.tokens, self.check))

        try:
            while (said := ran_out(once)) is not None:
                if program.updating:
                    raise Interrupted(
                        f"memory ran out when an update was half made ({said}); the same command "
                        "resumes from the last checkpoint, and needs more memory"
                    )
                generators.write(random_before)
                size = self.plan.prediction.choice.micro_batch_size
                self.shrink(halved(size), said)
                if not self.ranks.alone:
                    raise Restart(f"memory ran out on {self.ranks.name} at step {self.step + 1}")
        except StopRequested:
            generators.write(random_before)
            raise
        return outcomes[-1]

    def shrink(self, size: int, said: str) -> None:
        """Continue with micro-batches of `size` rows: more of them, in the same updates."""
        before = self.plan.prediction.choice.micro_batch_size
        why = f"memory ran out with {before} at a time, before step {self.step + 1} was done"
        plan = self.plan.chosen(MICRO, size, f"{why} ({said})")
        choice = plan.prediction.choice
        if (reason := refused(plan.recipe, traits_of(plan.recipe, choice))) is not None:
            raise InputError(f"{why} ({said}), and fewer at a time are no way out: {reason}")
        self.revise(plan)
        self.emit("memory", message=f"{why}; {size} at a time from here on")

    def revise(self, plan: Plan) -> None:
        """Continue by another revision of the plan; whichever rank knows writes it down."""
        self.plan = plan
        RunFolder(self.folder.path).append(PLAN, plan.row())

    def _guard(self, outcome: StepOutcome) -> None:
        """Let a few updates be skipped, then stop with the last good state on disk.

        Raises:
            InputError: too many in a row, or all of the run.
        """
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if outcome.skipped else 0
        if not outcome.skipped:
            self.updated = True
            return
        self.emit("warning", message=f"step {self.step}: loss or gradient not finite, skipped")
        refuse_divergence(self.plan, self.step, self.skipped_in_a_row, updated=self.updated)

    # State

    def save(self, *, last: bool = False) -> None:
        """Begin a checkpoint of the state as it is after `step` updates.

        Args:
            last: no update follows.

        Raises:
            DamagedMessage: something else came than a rank sent.
        """
        if self.saved == self.step:
            return
        with self.clock(CHECKPOINT), self.watched.marked():
            self.step_program.flush()
            self.ranks.receipts.settle(self.ranks.sum)
            self.step_program.hooks.checkpoint()
            start = self.clock.seconds
            self.store.save(self.step, self.registry, notes=self.record.notes(), last=last)
            self.saved, self.stalled = self.step, self.clock.seconds - start
        self.tell_of_checkpoints()

    def settle(self) -> None:
        """Wait until every checkpoint that was begun is in its place."""
        with self.clock(CHECKPOINT), self.watched.marked():
            self.store.wait()
        self.tell_of_checkpoints()

    def tell_of_checkpoints(self) -> None:
        """Tell of those that have come to their place since this was last asked."""
        for saved in self.store.poll():
            self.record.time.writing += saved.seconds
            self.written = saved.seconds
            self.emit(
                "checkpoint",
                step=saved.step,
                path=str(saved.path),
                seconds=self.stalled,
                written_seconds=saved.seconds,
                bytes=saved.bytes,
            )

    def tell_of_anomalies(self) -> None:
        """Tell of ranks that hold up the others, as far as it was found since this was last asked.

        The one for which the run is ended is written into its record by who ends it.
        """
        for row in self._anomalies.new():
            if not row.get("ends"):
                self.record.noticed({"step": self.step, **row})
                self.emit("anomaly", **{**row, "step": self.step, "message": row.get("sentence")})

    def tell_of_link(self) -> None:
        """Tell of a link that is far slower than the plan counts with; all ranks call this."""
        seen = self.link_check.found()
        if seen is not None and self.ranks.first:
            self.folder.append(ANOMALIES, slow_link_row(self.plan, seen))
            self.tell_of_anomalies()

    def take_up(self, checkpoint: Checkpoint, *, fork: bool = False) -> None:
        """Resume from a checkpoint's state; that of another run becomes this run's first.

        Another run may have been trained on other data, or by another optimizer.
        """
        checkpoint.load(self.registry, skip=left_by_fork(self) if fork else set())
        self.step = checkpoint.step
        self.saved = None if fork else checkpoint.step
        if fork:
            self.save()
            self.settle()


def _finite(value: float | None) -> float | None:
    """The value, or None where there is none, or JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None
