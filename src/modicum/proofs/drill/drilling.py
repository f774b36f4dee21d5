"""The drill itself: each case is planned, run in peace, run and killed, resumed, and compared."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from modicum.core.errors import DoesNotFit, FoundWanting, InputError, ModicumError
from modicum.core.plain_values import finite
from modicum.core.progress import Listener
from modicum.proofs.distances import worst
from modicum.proofs.drill.cases import NEW, RANKS, STEPS, TEXT, Case, draw
from modicum.proofs.drill.compared import differing, exported_score

# The measured peak of tensor bytes may be so far from the forecast.
PEAK_WITHIN = 0.15
# At least so many of the drawn recipes must be accepted, else the drill tests nothing.
ACCEPTED_SHARE = 0.6
# An exported model's loss is the run's to this part, by precision.
EXPORT_WITHIN = {"fp32": 1e-4, "bf16": 1e-2}
PATIENCE_SECONDS = 300.0
TIMED_OUT = 124


@dataclass
class Result:
    """What became of a case.

    Args:
        refused: the reason why it was not run; None where it was.
        faults: what was wrong with it, in words; nothing where it is as it should be.
    """

    case: Case
    refused: str | None = None
    faults: list[str] = field(default_factory=list)
    peak_ratio: float | None = None
    loss: float | None = None
    exported_loss: float | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it was refused with a reason, or everything agreed."""
        return not self.faults

    def as_json(self) -> dict[str, Any]:
        """The result as plain values."""
        values: dict[str, Any] = finite(asdict(self))
        return values | {"passed": self.passed, "name": self.case.name}


@dataclass(frozen=True)
class Drilled:
    """All results of a drill."""

    results: tuple[Result, ...]

    @property
    def accepted_share(self) -> float:
        """The part of the cases that were run."""
        return sum(r.refused is None for r in self.results) / max(len(self.results), 1)

    @property
    def passed(self) -> bool:
        """Whether every case passed, and enough were accepted."""
        return all(r.passed for r in self.results) and self.accepted_share >= ACCEPTED_SHARE

    def as_json(self) -> dict[str, Any]:
        """The drill as plain values."""
        return {
            "passed": self.passed,
            "cases": len(self.results),
            "cases_passed": sum(result.passed for result in self.results),
            "accepted_share": self.accepted_share,
            "results": [result.as_json() for result in self.results],
        }


def drill(seed: int, count: int, work: Path, *, listener: Listener = lambda event: None) -> Drilled:
    """Draw `count` cases and put each to the test, in folders of `work`.

    Args:
        listener: is called with `case` events, and `result` events with `Result.as_json`.
    """
    work.mkdir(parents=True, exist_ok=True)
    base = work / "base"
    listener({"event": "case", "name": "a trained model"})
    # Its head is a layer, of which an adapter can train a copy.
    model = NEW | {"tied_embeddings": False}
    made = {"model": model, "data": TEXT, "training": {"steps": 20}, "samples": {"count": 0}}
    # On a machine that it has not seen, a first run measures it.
    code, said = _train(made, base, patience=4 * PATIENCE_SECONDS)
    if code:
        raise FoundWanting(f"the model to adapt was not trained, which ended with {code}: {said}")
    results = []
    for number in range(count):
        case = draw(seed, number)
        listener({"event": "case", "name": case.name, "rooms": case.rooms})
        result = put_to_the_test(case, base, work / case.name)
        results.append(result)
        listener({"event": "result", **result.as_json()})
    return Drilled(tuple(results))


def put_to_the_test(case: Case, base: Path, folder: Path) -> Result:
    """Plan, run, kill, resume and compare one case; its folder is kept where something is wrong."""
    from modicum.planner import plan
    from modicum.recipe import Recipe

    started, result = time.monotonic(), Result(case)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        recipe = Recipe(**case.with_base(str(base.resolve())))
        plan(recipe, ranks=RANKS)
    except (InputError, DoesNotFit) as reason:
        result.refused = str(reason)
    except Exception as error:  # whatever comes instead of a reason is a finding
        result.faults.append(f"planning raised {type(error).__name__}: {error}")
    else:
        try:
            _run(case, recipe.plain(), folder, result)
        except (ModicumError, OSError, ValueError, AssertionError, RuntimeError) as error:
            result.faults.append(f"{type(error).__name__}: {error}")
    if result.passed:
        shutil.rmtree(folder, ignore_errors=True)
    result.seconds = round(time.monotonic() - started, 1)
    return result


def _run(case: Case, recipe: dict[str, Any], folder: Path, result: Result) -> None:
    calm, killed = folder / "calm", folder / "killed"
    code, said = _train(recipe, calm, ranks=RANKS)
    if code:
        result.faults.append(f"the run ended with {code}: {said}")
        return
    _kill(recipe, killed, case)
    code, said = _train(recipe, killed, ranks=RANKS)
    if code:
        result.faults.append(f"after the kill it ended with {code}: {said}")
        return
    result.faults += [f"resumed is not calm: {what}" for what in differing(calm, killed)]
    content = json.loads((calm / "run.json").read_text())
    peak = content["peak_bytes"]
    result.peak_ratio = peak["measured"] / peak["predicted"]
    if abs(result.peak_ratio - 1) > PEAK_WITHIN:
        told = f"{result.peak_ratio:.3f}"
        result.faults.append(f"the measured peak of tensor bytes is {told} of the forecast")
    if (loss := content["final"]["validation_loss"]) is None:
        result.faults.append("its validation loss is not finite")
        return
    result.loss = loss
    result.exported_loss = exported_score(recipe, calm)
    within = EXPORT_WITHIN[recipe["training"]["precision"]]
    if worst([abs(result.exported_loss - result.loss)]) > within * abs(result.loss):
        result.faults.append(
            f"what was exported scores {result.exported_loss:.6f}, the run {result.loss:.6f}"
        )


# Processes


def _command(recipe: dict[str, Any], out: Path, ranks: int) -> list[str]:
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_suffix(".json")  # which YAML can read
    file.write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "modicum", "train", str(file), "--out", str(out)]
    return [*command, *(["--ranks", str(ranks)] if ranks > 1 else []), "--progress", "quiet"]


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _train(
    recipe: dict[str, Any], out: Path, ranks: int = 1, patience: float = PATIENCE_SECONDS
) -> tuple[int, str]:
    """Run to the end; the exit status, and the end of what was said."""
    try:
        done = subprocess.run(
            _command(recipe, out, ranks),
            capture_output=True,
            text=True,
            env=_environment(),
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TIMED_OUT, f"no end in {patience:.0f} s"
    return done.returncode, (done.stderr or done.stdout).strip()[-500:]


def _kill(recipe: dict[str, Any], out: Path, case: Case) -> None:
    """Run until some steps are done, kill a process, and wait until all have ended."""
    process = subprocess.Popen(
        _command(recipe, out, RANKS),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
    )
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None and _steps_done(out) < min(case.kill_after, STEPS):
            if time.monotonic() > until:
                raise TimeoutError("the run that was to be killed made no steps")
            time.sleep(0.005)
        if process.poll() is None:
            _victim(process.pid, case.victim).kill()
        while time.monotonic() < until and (process.poll() is None or _members(process.pid)):
            time.sleep(0.02)
    finally:
        for member in _members(process.pid):
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def _steps_done(out: Path) -> int:
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def _victim(leader: int, rank: int) -> psutil.Process:
    """The process of a rank; while there is none, the one that watches them."""
    for member in _members(leader):
        with suppress(psutil.Error):
            if member.pid != leader and member.environ().get("RANK") == str(rank):
                return member
    return psutil.Process(leader)


def _members(leader: int) -> list[psutil.Process]:
    """The processes that are alive of the session that `leader` began."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
