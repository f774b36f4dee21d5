"""Trials run one after the other, or several at once; whatever they raise is their outcome."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ThreadPoolExecutor,
    as_completed,
)
from pathlib import Path

from modicum.comparison.outcome import Outcome, Trial
from modicum.comparison.records import Job
from modicum.core.errors import InputError, Interrupted, ModicumError

Done = Callable[[Job, Outcome], None]


def attempted(trial: Trial, job: Job) -> Outcome:
    """What a trial comes to, also where it raises.

    Raises:
        Interrupted: the trial was asked to stop, and is no outcome.
    """
    try:
        return trial(job.side, job.settings, job.seed, job.part)
    except Interrupted:
        raise
    except (MemoryError, RuntimeError) as error:
        # That of an accelerator is known by its class's name: this imports no PyTorch.
        full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        return Outcome("out_of_memory" if full else "crashed", message=_sentence(error))
    except ModicumError as error:
        return Outcome("refused", message=str(error))
    except Exception as error:
        return Outcome("crashed", message=_sentence(error))


def _sentence(error: Exception) -> str:
    """The error's text in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}{place}"


def run_jobs(
    trial: Trial,
    jobs: Sequence[Job],
    done: Done,
    *,
    parallel: int = 1,
    executor: Executor | None = None,
) -> None:
    """Run trials and call `done` with each outcome as it comes, in this thread.

    Where this ends early, by Ctrl-C or an error of `done`, no other trial is begun; `trial.stop()`
    is called where there is one, and what ends well all the same is passed to `done` too.

    Args:
        parallel: how many run at once, each in a thread of its own.
        executor: where they run instead; a pool of processes needs a trial that can be pickled.

    Raises:
        Interrupted: a trial, or the worker that ran it, was stopped.
    """
    if executor is None and parallel == 1:
        for job in jobs:
            done(job, attempted(trial, job))
        return
    own = ThreadPoolExecutor(parallel) if executor is None else None
    pool = executor or own
    assert pool is not None
    futures = {pool.submit(attempted, trial, job): job for job in jobs}
    left = dict(futures)
    try:
        for future in as_completed(futures):
            outcome = _result(future)
            del left[future]
            done(futures[future], outcome)
    except BaseException as error:
        _stop(trial, left)
        if not isinstance(error, InputError):  # of a disk that is full
            _rescue(left, done)
        raise
    finally:
        if own is not None:
            own.shutdown(wait=True)


def _result(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenExecutor:
        raise Interrupted(
            "a process that ran trials was killed, by the system or by hand; the same command "
            "resumes, with fewer at once (`parallel`) where memory was short"
        ) from None


def _stop(trial: Trial, left: dict[Future[Outcome], Job]) -> None:
    for future in left:
        future.cancel()
    stop = getattr(trial, "stop", None)
    if stop is not None:
        stop()


def _rescue(left: dict[Future[Outcome], Job], done: Done) -> None:
    """Pass on what still ends well; other ends may be those of a trial that was stopped."""
    for future, job in left.items():
        if not future.cancelled() and future.exception() is None:
            outcome = future.result()
            if outcome.status in ("finished", "diverged"):
                done(job, outcome)
