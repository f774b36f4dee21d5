from __future__ import annotations

import os
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest
from formula_trials import Bowl

from modicum.comparison import Outcome, Settings, TrialPart
from modicum.comparison.records import Job
from modicum.comparison.workers import attempted, run_jobs
from modicum.core.errors import DoesNotFit, InputError, Interrupted

JOBS = [Job("a", {"rate": 10.0**-n}, n, "tune") for n in range(1, 9)]


class OutOfMemoryError(RuntimeError):
    """Called as PyTorch's is."""


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (MemoryError(), "out_of_memory", "MemoryError: no message"),
        (OutOfMemoryError("CUDA\nout"), "out_of_memory", "OutOfMemoryError: CUDA out"),
        (RuntimeError("shapes"), "crashed", "RuntimeError: shapes (formula_trials.py, line"),
        (KeyError("rate"), "crashed", "KeyError: 'rate'"),
        (InputError("no such task"), "refused", "no such task"),
        (DoesNotFit("9 GB", ["bf16"]), "refused", "9 GB\n  - bf16"),
    ],
)
def test_what_a_trial_raises_is_its_outcome(error: Exception, status: str, message: str) -> None:
    outcome = attempted(Bowl(ends={("a", None): error}), JOBS[0])
    assert outcome.status == status
    assert outcome.message.startswith(message)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stopped"), SystemExit()])
def test_what_stops_a_process_is_no_outcome(error: BaseException) -> None:
    with pytest.raises(type(error)):
        attempted(Bowl(ends={("a", None): error}), JOBS[0])


def test_no_more_run_at_once_than_asked_for() -> None:
    running, most, lock, gate = [0], [0], threading.Lock(), threading.Barrier(3, timeout=10)

    def trial(side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        if seed <= 6:
            gate.wait()  # three are here at once
        with lock:
            running[0] -= 1
        return Outcome("finished", float(seed))

    found = {}
    run_jobs(trial, JOBS, lambda job, outcome: found.update({job.seed: outcome.loss}), parallel=3)
    assert found == {n: float(n) for n in range(1, 9)}
    assert most == [3]


class Stoppable:
    """Its second trial is interrupted, its first ends only when it is stopped."""

    def __init__(self, end: Outcome) -> None:
        self.end, self.begun, self.stopped = end, list[int](), threading.Event()

    def __call__(self, side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        self.begun.append(seed)
        if seed == 2:
            raise Interrupted("by hand")
        assert self.stopped.wait(10)
        return self.end

    def stop(self) -> None:
        self.stopped.set()


@pytest.mark.parametrize(("status", "kept"), [("finished", [1]), ("crashed", [])])
def test_where_one_is_stopped_all_are_and_what_ended_well_is_kept(
    status: str, kept: list[int]
) -> None:
    done, trial = list[int](), Stoppable(Outcome(status, 1.0))  # type: ignore[arg-type]
    with pytest.raises(Interrupted):
        run_jobs(trial, JOBS, lambda job, outcome: done.append(job.seed), parallel=2)
    assert sorted(trial.begun)[:2] == [1, 2]
    assert len(trial.begun) <= 3
    assert done[:1] == kept


def dies(side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
    os._exit(9)


@pytest.mark.expensive
def test_a_worker_that_the_system_kills_is_one_sentence() -> None:
    with (
        ProcessPoolExecutor(1) as executor,
        pytest.raises(Interrupted, match=r"was killed.*the same command resumes"),
    ):
        run_jobs(dies, JOBS, lambda job, outcome: None, executor=executor)
