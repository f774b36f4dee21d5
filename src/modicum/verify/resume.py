"""Whether a run that is stopped and restored continues as if nothing had been.

Its steps are done twice, in copies of its folder: without interruption, and stopped in the middle
and taken up by a new process. What differs first is what the checkpoint has lost.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from modicum.checkpoint import Checkpoint, CheckpointStore, Damaged
from modicum.core.clock import START, group_of
from modicum.core.errors import InputError
from modicum.core.progress import StageProgress
from modicum.core.units import format_bytes, format_duration
from modicum.trainer.folder import METRICS, RunFolder
from modicum.verify.compared import first_differences, relative, result_differences, tensor_distance
from modicum.verify.copies import begun_run, copied, ranks_of
from modicum.verify.findings import Verification, Wanting
from modicum.verify.processes import launched
from modicum.verify.stretch import Stretch
from modicum.verify.traces import StepTrace, results

# Steps before the stop: optimizers have state then, and what runs in the first step alone is over.
BEFORE = 2
# Of the state: of each of three parts two states, and two checkpoints that the trainer keeps.
COPIES = 12
STARTS = 3  # of a process, or of all ranks
# How far losses and weights may be apart on another number of ranks, over themselves: sums are in
# another order there.
TOLERANCES = {"fp32": 1e-3, "bf16": 1e-2}


def verify_resume(
    run: str | Path,
    *,
    steps: int = 4,
    ranks: int | None = None,
    tolerance: float | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: StageProgress = lambda *_: None,
) -> Verification:
    """Stop a run, restore it, and hold what follows against the uninterrupted continuation.

    Compared to the bit, before each update and after the last, are the rows and batches of the
    data, all state (weights, moments, masters, step counts, generators, methods' own), the frozen
    weights, and after each update loss, gradient norm and learning rate. The run's folder is left
    as it is; copies of its state are in the temporary folder for as long as this takes.

    Args:
        run: a run folder; its newest checkpoint that leaves enough steps is where both begin.
        steps: how many are compared after the restoring.
        ranks: of the restored part; None: as many as the run had. Losses and weights of another
            number are compared within a tolerance.
        tolerance: relative; None: 1e-3, in bf16 1e-2.
        say: hears what this will cost before it begins.

    Raises:
        InputError: there is no run, or it cannot be continued here.
    """
    folder = begun_run(run)
    with tempfile.TemporaryDirectory(prefix="modicum-verify-") as work:
        trial = ResumeTrial.of(folder, Path(work), steps, ranks, tolerance)
        if trial.findings:
            return Verification(trial.checks, trial.findings)
        say(trial.cost)
        parts = trial.parts()
        for number, (name, part) in enumerate(parts, start=1):
            progress(f"{number} of {len(parts)}: {name}", 0, None)
            part()
        progress("comparing", 0, None)
        return trial.compared()


@dataclass
class ResumeTrial:
    """The parts of a verification, in the order in which they run, and what they have found.

    Args:
        begin: the step of the checkpoint that both begin with; 0: of none.
        stop, end: the step after which one of them is stopped, and the last.
        ranks: of the run; `others` of the restored part.
    """

    run: RunFolder
    work: Path
    begin: int
    stop: int
    end: int
    ranks: int
    others: int
    tolerance: float
    checks: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Wanting] = field(default_factory=list)

    @classmethod
    def of(
        cls, run: RunFolder, work: Path, steps: int, ranks: int | None, tolerance: float | None
    ) -> ResumeTrial:
        """Choose the steps; damaged checkpoints are findings.

        Raises:
            InputError: the run has too few steps, or none to begin with.
        """
        record, recipe = run.read_record(), run.read_recipe()
        of_run = ranks_of(run)
        allowed = TOLERANCES["bf16" if recipe.training.precision == "bf16" else "fp32"]
        planned = int(record.get("steps_planned", 0))
        if planned < 2:
            problem = "has a single step, so there is nothing to resume"
            raise InputError(problem, file=run.path, field="training.steps", value=planned)
        steps = min(steps, planned - 1)
        damaged, begin = _begin(run, planned - steps - 1)
        before = min(BEFORE, planned - steps - begin)
        if begin == 0 and record.get("forked_from"):
            problem = f"began as a fork, and has no checkpoint with {steps + 1} steps after it"
            raise InputError(f"{problem}; ask for fewer --steps", file=run.path)
        trial = cls(
            run, work, begin, begin + before, begin + before + steps, of_run,
            ranks or of_run, allowed if tolerance is None else tolerance,
        )  # fmt: skip
        trial.findings += damaged
        if trial.disk_bytes > (free := shutil.disk_usage(work).free):
            problem = f"copies of the state take up to {format_bytes(trial.disk_bytes)}, and "
            problem += f"{format_bytes(free)} are free; name a larger folder in TMPDIR"
            raise InputError(problem, file=work)
        return trial

    @property
    def disk_bytes(self) -> int:
        """What copies of the state take at most, by the checkpoint that both begin with."""
        folder = CheckpointStore(self.run.path / "checkpoints").path(self.begin)
        return COPIES * sum(file.stat().st_size for file in folder.glob("*") if self.begin)

    @property
    def cost(self) -> str:
        """What the parts cost, in words, by the run's own record."""
        count = (self.end - self.begin) * 2
        start, step = self._start_seconds, self._step_seconds
        starts = f"{STARTS} starts" + ("" if start is None else f" of {format_duration(start)}")
        took = ""
        if step is not None:
            in_all = count * step + STARTS * (start or 0.0)
            took = f", about {format_duration(in_all)} in all by its record"
        of = f"a checkpoint of step {self.begin}" if self.begin else "the beginning"
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        if self.others != self.ranks:
            ranks = f" on {self.ranks} and then {self.others} ranks"
        disk = f"up to {format_bytes(self.disk_bytes)} of disk, " if self.disk_bytes else ""
        return (
            f"from {of}: {count} steps{ranks} and {starts}{took}; "
            f"{disk}in copies, the run's folder is not touched"
        )

    @property
    def _step_seconds(self) -> float | None:
        """What a step of the run takes, by its own record; None where it has none."""
        seconds = [row["seconds"] for row in self.run.rows(METRICS)]
        return median(seconds) if seconds else None

    @property
    def _start_seconds(self) -> float | None:
        """What a start of the run took on average; None where it is not recorded."""
        record = self.run.read_record()
        rows = (record.get("time") or {}).get("rows") or {}
        started = sum(seconds for name, seconds in rows.items() if group_of(name) == START)
        return started / (1 + (record.get("interruptions") or 0)) or None

    def parts(self) -> list[tuple[str, Callable[[], None]]]:
        """What is done, by name."""
        start, step = self._start_seconds, self._step_seconds

        def named(words: str, steps: int) -> str:
            """With how long it takes, where that is known."""
            if step is None:
                return words
            return f"{words}, about {format_duration((start or 0.0) + steps * step)}"

        span = f"steps {self.begin + 1} to {self.end}"
        before, after = self.stop - self.begin, self.end - self.stop
        return [
            (named(f"without interruption, {span}", before + after), self.uninterrupted),
            (named(f"stopped after step {self.stop}", before), self.stopped),
            (named(f"restored, up to step {self.end}", after), self.restored),
        ]

    def uninterrupted(self, name: str = "uninterrupted") -> None:
        """All steps in one process."""
        copied(self.run, self.work / name, self.begin)
        traces, kept = self.work / f"{name}.traces", (self.stop, self.end)
        launched(Stretch(self.work / name, self.end, traces, kept, self.ranks))

    def stopped(self) -> None:
        """The steps up to the stop."""
        copied(self.run, self.work / "stopped", self.begin)
        launched(Stretch(self.work / "stopped", self.stop, ranks=self.ranks))

    def restored(self) -> None:
        """The others, in a new process."""
        traces, kept = self.work / "restored.traces", (self.stop, self.end)
        launched(Stretch(self.work / "stopped", self.end, traces, kept, self.others))

    # Comparing

    def compared(self) -> Verification:
        """Hold them against each other; and where they differ, two that were not stopped."""
        calm = StepTrace.of(self.work / "uninterrupted.traces")
        restored = StepTrace.of(self.work / "restored.traces")
        if self.others == self.ranks:
            found = [*self._before(), *first_differences(calm, restored, self.stop + 1)]
        else:
            found = [*self._before(), *self._within(calm[0], restored[0])]
        if found and (chance := self._chance(calm)):
            found = chance
        self.findings += found
        exact = self.others == self.ranks
        self.checks += [
            {"check": "steps", "begin": self.begin, "stop": self.stop, "end": self.end},
            {"check": "ranks", "run": self.ranks, "restored": self.others},
            {"check": "compared", "exact": exact, "tolerance": 0.0 if exact else self.tolerance,
             "entries": sum(len(view) for view in calm[0].first["state"].values())},
        ]  # fmt: skip
        self._of_record()
        return Verification(self.checks, self.findings)

    def _before(self) -> list[Wanting]:
        """Of the steps before the stop, which nothing has interrupted."""
        rows = [
            {row["step"]: results(row) for row in self._copy(name).rows(METRICS)}
            for name in ("uninterrupted", "stopped")
        ]
        for step in range(self.begin + 1, self.stop + 1):
            if found := list(result_differences(rows[0][step], rows[1][step], step)):
                return found
        return []

    def _chance(self, calm: list[StepTrace]) -> list[Wanting]:
        """What differs between two uninterrupted continuations: then it is no fault of a resume."""
        self.uninterrupted("again")
        found = first_differences(calm, StepTrace.of(self.work / "again.traces"), self.begin + 1)
        return [
            Wanting("determinism", f"{each.what}, {each.where}",
                    "the same in two uninterrupted continuations", each.found)
            for each in found[:1]
        ]  # fmt: skip

    def _within(self, calm: StepTrace, restored: StepTrace) -> list[Wanting]:
        """Losses and weights on another number of ranks."""
        mine, theirs = calm.lines(), restored.lines()
        for step in range(self.stop + 1, self.end + 1):
            if mine[step]["rows"] != theirs[step]["rows"]:
                return [Wanting("rows", f"step {step}", "those of the run's ranks", "others")]
            one, two = ({"loss": lines[step]["results"]["loss"]} for lines in (mine, theirs))
            if found := list(result_differences(one, two, step, self.tolerance)):
                return found
        for key in mine[self.end + 1]["state"]["model"]:
            pair = [trace.entry(self.end, "model", key) for trace in (calm, restored)]
            if (amount := tensor_distance(*pair)) > self.tolerance:
                expected = f"at most {self.tolerance:g} of its norm apart"
                return [Wanting("model", f"{key} after step {self.end}", expected, f"{amount:.2g}")]
        return []

    def _of_record(self) -> None:
        """Hold the uninterrupted steps against those that the run's own record has."""
        known = {row["step"]: results(row) for row in self.run.rows(METRICS)}
        done = {row["step"]: results(row) for row in self._copy("uninterrupted").rows(METRICS)}
        steps = [step for step in done if step in known and step > self.begin]
        exact = self._as_recorded()
        apart = {step: relative(known[step].get("loss"), done[step].get("loss")) for step in steps}
        allowed = 0.0 if exact else self.tolerance
        for step in steps:
            if apart[step] > allowed or (exact and known[step] != done[step]):
                found = next(result_differences(known[step], done[step], step))
                place = f"{found.what} of step {step}, from the checkpoint of {self.begin}"
                self.findings.append(Wanting("record", place, found.expected, found.found))
                break
        self.checks.append({"check": "record", "steps": len(steps), "exact": exact,
                            "largest": max(apart.values(), default=0.0),
                            "tolerance": allowed})  # fmt: skip

    def _as_recorded(self) -> bool:
        """Whether versions, processor, kernels, threads and ranks are those of the record."""
        there, here = (
            [{**each, "after_step": None} for each in folder.read_record().get("environments", [])]
            for folder in (self.run, self._copy("uninterrupted"))
        )
        return bool(there) and all(each == here[-1] for each in there)

    def _copy(self, name: str) -> RunFolder:
        return RunFolder(self.work / name)


def _begin(run: RunFolder, latest: int) -> tuple[list[Wanting], int]:
    """Damaged checkpoints, and the step of the newest good one up to `latest`; 0 without any."""
    store, damaged, begin = CheckpointStore(run.path / "checkpoints"), [], 0
    for step in store.steps():
        try:
            Checkpoint.of(store.path(step))
        except Damaged as error:
            damaged.append(
                Wanting("checkpoint", f"{error.file}", "what was written", error.problem)
            )
            continue
        begin = step if step <= latest else begin
    return damaged, begin
