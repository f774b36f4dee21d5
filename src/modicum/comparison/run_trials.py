"""A trial as a run folder: trained by `modicum train` in a process that resumes what it has begun.

What a run needs no more once its figures are read, weights and checkpoints, is removed, so that a
hundred trials take little more room than one. The data that it has prepared is offered to the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Literal

from modicum import recipe_yaml
from modicum.comparison.budgets import set_in
from modicum.comparison.kept_data import KeptData
from modicum.comparison.outcome import Outcome, Settings, Status, TrialPart, trial_name
from modicum.core.cores import usable_cores
from modicum.core.errors import DoesNotFit, InputError, Interrupted
from modicum.core.files import DISK_IS_FULL, disk_errors, remove, write_text
from modicum.parallel.rank_environment import SUPERVISOR
from modicum.recipe import Recipe
from modicum.trainer.divergence import TrainingDiverged
from modicum.trainer.folder import EVALUATIONS, PLAN, RunFolder

# What a process that is no rank must not inherit from one that is.
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
RECIPE = "recipe"  # among a side's fixed settings: which recipe it is
_WARMUP = "training.warmup_fraction"  # instead of the other two
_NEVER = 10**9  # steps between evaluations: before the first update and after the last alone
_LARGE = ("checkpoints", "model", "adapter", "compressed", "data", "tokenizer", "base")
_GRACE = 60.0  # seconds in which a run that is asked to stop may save its state
_OURS = "modicum: "  # what an error begins with, where the command says it


@dataclass
class RunTrials:
    """The trial of `modicum compare`: side, settings, seed -> a run folder -> what came of it.

    Args:
        folder: of the comparison; runs are in `runs/` there.
        recipes: of each side, with all that its budget has settled.
        parallel: how many run at once; they share the cores.
        ranks: of each run.
        tested: whether a run that judges reads the test part of its data.
        rows: of the validation data that are looked at; `all`: what a trial is judged by.
    """

    folder: Path
    recipes: Mapping[str, Recipe]
    parallel: int = 1
    ranks: int = 1
    tested: bool = False
    rows: int | Literal["all"] = "all"
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set, repr=False)
    _lock: Any = field(default_factory=Lock, repr=False)
    _stopped: bool = field(default=False, repr=False)

    def __call__(self, side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        """Train, or resume, or read what came of a run that has finished.

        Raises:
            Interrupted: it was asked to stop, and saved its state; or nothing can be written, which
                is no fault of the settings, so that it is no outcome of theirs.
        """
        run = self.folder / "runs" / trial_name(side, settings, seed, part)
        try:
            recipe = self.recipe(side, settings, seed, part)
        except InputError as error:
            return Outcome("refused", message=str(error))
        if not RunFolder(run).started() or not _ended(run):
            self.data.offer(recipe, run)
            code = self._train(run, recipe)
            if code == Interrupted.exit_code or self._stopped:
                raise Interrupted(f"{run.name} was asked to stop; the same command resumes it")
        else:
            code = 0
        outcome = outcome_of(run, code)
        if outcome.status == "refused" and DISK_IS_FULL in outcome.message:
            raise Interrupted(f"{run.name}: {outcome.message}")
        if outcome.status in ("finished", "diverged"):
            self.data.keep(recipe, run)
            for name in _LARGE:
                remove(run / name)
        return outcome

    def begun(self, side: str, settings: Settings, seed: int, part: TrialPart) -> bool:
        """Whether the trial has a run here."""
        return RunFolder(self.folder / "runs" / trial_name(side, settings, seed, part)).started()

    @property
    def data(self) -> KeptData:
        """What trials before this one have prepared."""
        return KeptData(self.folder)

    def recipe(self, side: str, settings: Settings, seed: int, part: TrialPart) -> Recipe:
        """What is trained: the side's recipe with these settings, judged after its last update.

        All rows of the validation data are looked at unless `rows` says otherwise, and the last
        weights are what counts: an earlier and better evaluation would be one that was chosen by
        what it is judged with.
        """
        fixed: dict[str, Any] = {
            "training.seed": seed,
            "evaluation.rows": self.rows,
            "evaluation.every": _NEVER,
            "evaluation.keep_best": False,
            "evaluation.patience": None,
            "evaluation.test": self.tested and part == "judge",
            "samples.count": 0,
            "samples.prompts": [],
            "tracking.to": [],
        }
        made = self.settled(side, settings)
        if self.rows == "all" and made.data.streaming and made.data.validation_path is None:
            del fixed["evaluation.rows"]  # nobody reads a stream in full
        return set_in(made, fixed)

    def settled(self, side: str, settings: Settings) -> Recipe:
        """The side's recipe with these settings."""
        own = {path: value for path, value in settings.items() if path != RECIPE}
        if _WARMUP in own:
            own |= {"training.warmup_steps": 0, "training.warmup_tokens": None}
        return set_in(self.recipes[side], own)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs of it: not the runs that this one has begun."""
        own = ("_running", "_lock", "_stopped")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def stop(self) -> None:
        """End the runs that are under way; each saves its state first."""
        with self._lock:
            self._stopped, running = True, list(self._running)
        for process in running:
            process.terminate()

    def _train(self, run: Path, recipe: Recipe) -> int:
        """Run `modicum train` on it to its end; the exit code.

        Raises:
            Interrupted: what it needs cannot be written.
        """
        try:
            log = self._begin(run, recipe)
        except InputError as error:
            raise Interrupted(str(error)) from None
        where = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
        file = str(run.with_suffix(".yaml"))
        command = [sys.executable, *where, "-m", "modicum", "train", file, "--out", str(run)]
        command += ["--progress", "quiet"]
        if self.ranks > 1:
            command += ["--ranks", str(self.ranks)]
        with log:
            process = subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        with self._lock:
            self._running.add(process)
            if self._stopped:
                process.terminate()
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            raise
        finally:
            with self._lock:
                self._running.discard(process)

    @staticmethod
    def _begin(run: Path, recipe: Recipe) -> BinaryIO:
        """Write the recipe that a run is to have; the file that takes what it says.

        Raises:
            InputError: nothing can be written.
        """
        with disk_errors(run):
            run.parent.mkdir(parents=True, exist_ok=True)
            write_text(run.with_suffix(".yaml"), recipe_yaml.dump(recipe))
            return open(run.with_suffix(".log"), "ab")

    @property
    def threads(self) -> str:
        """Of each rank: as the environment says, else its share of the cores."""
        share = usable_cores() // (self.parallel * self.ranks)
        return os.environ.get("OMP_NUM_THREADS") or str(max(1, share))

    @property
    def cores(self) -> int:
        """Of all ranks of a run."""
        return self.ranks * int(self.threads.partition(",")[0])

    def _environment(self) -> dict[str, str]:
        """This process's, for one that is no rank, ends with this one, and has its share of cores.

        Sums depend on the number of threads, so it is the same for every trial of a comparison.
        """
        own = {name: value for name, value in os.environ.items() if name not in _RANK}
        return own | {SUPERVISOR: str(os.getpid()), "OMP_NUM_THREADS": self.threads}


def recipe_digest(recipe: Recipe) -> str:
    """A name for a recipe: the same fields have the same one."""
    text = json.dumps(recipe.plain(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def outcome_of(run: Path, code: int) -> Outcome:
    """What came of a run, by its folder and the exit code of the process that ended.

    Args:
        code: negative where a signal killed it.
    """
    folder = RunFolder(run)
    record = folder.read_record()
    finished = record.get("status") == "finished"
    if code < 0 and not finished:
        return Outcome("crashed", folder=str(run), message=f"was killed by signal {-code}")
    if not finished:
        status: Status = "refused" if code == InputError.exit_code else "crashed"
        if record.get("failed_by") == TrainingDiverged.__name__:
            status = "diverged"
        elif code == DoesNotFit.exit_code:  # also before its first step: with what is free by then
            status = "out_of_memory"
        said = record.get("error") or _last_words(run, code)
        if not said:  # a refusal gives a reason
            return Outcome("crashed", folder=str(run), message="it ended without a word")
        return Outcome(status, folder=str(run), message=said)
    evaluated = folder.rows(EVALUATIONS)
    if not evaluated:
        problem = "the run has no validation data to be judged by; see data.validation_fraction"
        return Outcome("refused", folder=str(run), message=problem)
    last = evaluated[-1]
    figures = {name: value for name, value in last.items() if isinstance(value, float)}
    test = (record.get("final") or {}).get("test") or {}
    return Outcome(
        "finished",
        loss=_number(last["loss"]),
        test={"test_loss": _number(test["loss"])} if test else {},
        metrics={name: value for name, value in figures.items() if "second" not in name},
        tokens=record["tokens"],
        seconds=sum(row["seconds"] for row in folder.rows("metrics.jsonl")),
        bytes=_bytes(folder, record),
        data_hash=(record.get("inputs") or {}).get("order", ""),
        folder=str(run),
    )


def _ended(run: Path) -> bool:
    """Whether a run that is there will make no further step."""
    record = RunFolder(run).read_record()
    diverged = record.get("failed_by") == TrainingDiverged.__name__
    return diverged or record.get("status") == "finished"


def _bytes(folder: RunFolder, record: Mapping[str, Any]) -> dict[str, int]:
    """Measured where the run measures it, else as its last plan has it."""
    plan = folder.rows(PLAN)[-1]
    table = plan["prediction"]["table"]
    peaks = record["peak_bytes"]
    found = {
        "peak": peaks["measured"] or peaks["predicted"],
        "state": sum(row["bytes"] for row in table if row["kind"] == "optimizer"),
        "trained": 4 * record["parameters"]["trainable"],
        "process": peaks["process"],
    }
    return {name: int(value) for name, value in found.items() if value is not None}


def _number(value: float | None) -> float:
    """A loss of a row, which has None for what is no number."""
    return float("nan") if value is None else value


def _last_words(run: Path, code: int) -> str:
    """What the process said last; empty: nothing.

    A refusal may be of many lines, of which the first says what is wrong.
    """
    with suppress(OSError, IndexError):
        text = run.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
        lines = text.strip().splitlines()
        if code in (InputError.exit_code, DoesNotFit.exit_code):
            lines = [line for line in lines if line.startswith(_OURS)] or lines
        return lines[-1].removeprefix(_OURS).removeprefix("error: ")
    return ""
