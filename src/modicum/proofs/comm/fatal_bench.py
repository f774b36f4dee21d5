"""Ranks that are killed or paused, and who is named: for C4's proof and its benchmark.

Ranks sleep in place of computing and sum two tensors in each iteration. A fault takes all processes
of its trial with it, so each trial has new ones, forked from one process that has torch imported.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from modicum.comm.c4 import C4
from modicum.core.errors import Interrupted
from modicum.parallel.launch import shared_environment
from modicum.parallel.rank_environment import SUPERVISOR
from modicum.proofs.comm.fault_bench import COMPUTE, TrialFinding, events_of, iteration
from modicum.proofs.ranks import RanksFailed

# What a rank is called to which that is done.
FATAL = {"killed": "dead", "paused in compute": "stopped", "paused in a collective": "stopped"}
AT = 30  # the iteration of the fault; before it are the first calls
STARTED_SECONDS, WITHIN_SECONDS = 60.0, 30.0  # until the fault, and after it


def fatal_trials(trials: list[dict[str, Any]], size: int = 4, shift: int = 0) -> list[TrialFinding]:
    """Kill or pause a rank in each trial: who was named, when, and how the others ended.

    Args:
        trials: the `kind` of the fault, one of `FATAL`, and the `rank` that is asked for; with
            `watched` false nobody watches, and it counts whether what the others print within
            `within` seconds names the rank.
        shift: that many ranks further the fault is injected.

    Returns:
        Of each whether it was `right`, `seconds` from the fault to the sentence, `ended` from the
        fault to the end of the last process, and whether all that were left ended with `code_4`.

    Raises:
        RanksFailed: ranks ended before their fault, or did not come as far.
    """
    task = json.dumps({"trials": trials, "size": size, "shift": shift})
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop(SUPERVISOR, None)
    command = [sys.executable, "-m", "modicum.proofs.comm.fatal_bench"]
    done = subprocess.run(
        command, input=task, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RanksFailed(f"ranks with a fatal fault: {done.stderr.strip()}")
    found: list[TrialFinding] = json.loads(done.stdout)
    return found


def _trial(
    kind: str, rank: int, size: int, shift: int, watched: bool = True, within: float = 0.0
) -> TrialFinding:
    """One trial; all of its processes have ended when it returns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        guilty = (rank + shift) % size
        task = {"kind": kind, "rank": guilty, "folder": name, "watched": watched}
        with _forked(size, task) as codes:
            _await(folder / "fault", codes)
            if watched:
                return _followed(folder, codes, kind, rank)
            _until(time.time() + within, codes)
            said = "".join(file.read_text(errors="replace") for file in folder.glob("said-*"))
        right = _names(said, guilty)
        return {"kind": kind, "rank": rank, "watched": False, "right": right, "said": [said]}


def _names(said: str, rank: int) -> bool:
    """Whether printed text names a rank in any way: `rank 3`, `rank3`, `[3]`."""
    return re.search(rf"(?i)rank[ =:]?{rank}\b|\[{rank}\]", said) is not None


def _followed(folder: Path, codes: dict[int, int | None], kind: str, asked: int) -> TrialFinding:
    """What is said of a fault, until all processes have ended."""
    when = float((folder / "fault").read_text(encoding="utf-8"))
    found: TrialFinding = {"kind": kind, "rank": asked, "watched": True, "right": False, "said": []}
    end = when + WITHIN_SECONDS
    while not _until(time.time() + 0.02, codes) and time.time() < end:
        events = [] if found["said"] else events_of(folder / "record")
        if events:
            first = events[0]
            found["seconds"], found["said"] = time.time() - when, [first["sentence"]]
            as_is = (first["kind"], first["rank"]) == (FATAL[kind], asked)
            inside = first["inside"] == (kind == "paused in a collective")
            found["right"] = as_is and (inside or kind == "killed")
    found["ended"] = time.time() - when
    others = [code for code in codes.values() if code != -signal.SIGKILL]
    found["code_4"] = others == [Interrupted.exit_code] * (len(codes) - 1)
    return found


# Processes


@contextmanager
def _forked(size: int, task: Mapping[str, Any]) -> Iterator[dict[int, int | None]]:
    """Ranks of a trial, by their process ids the codes of those that have ended."""
    shared, codes = shared_environment(size), dict[int, int | None]()
    del shared[SUPERVISOR]
    try:
        for rank in range(size):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if not (process := os.fork()):
                _serve(own, task)
            codes[process] = None
        yield codes
    finally:
        for process in [one for one, code in codes.items() if code is None]:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _until(end: float, codes: dict[int, int | None]) -> bool:
    """Wait until then, or until all have ended; whether they have."""
    while None in codes.values() and time.time() < end:
        time.sleep(0.01)
        for process in [one for one, code in codes.items() if code is None]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
    return None not in codes.values()


def _await(fault: Path, codes: dict[int, int | None]) -> None:
    end = time.time() + STARTED_SECONDS
    while not fault.exists():
        _until(time.time() + 0.01, codes)
        ended = any(code is not None for code in codes.values())
        if (ended or time.time() > end) and not fault.exists():
            raise RanksFailed("a rank has ended before its fault" if ended else "no fault came")


def _serve(environment: Mapping[str, str], task: Mapping[str, Any]) -> None:
    """Be a rank; a process that was forked never returns from here."""
    try:
        os.environ.update(environment)
        said = os.open(Path(task["folder"]) / f"said-{environment['RANK']}", os.O_CREAT | os.O_RDWR)
        for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
            os.dup2(file, number)
        _train(**task)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(1)


def _train(kind: str, rank: int, folder: str, watched: bool) -> None:
    """Iterations, and the fault at the rank that it is for."""
    dist.init_process_group("gloo")
    guilty, inside = dist.get_rank() == rank, kind == "paused in a collective"
    if watched:
        C4(silent_seconds=3.0, late_seconds=60.0).watch(record=Path(folder) / "record")
    for step in range(10_000):
        time.sleep(COMPUTE / 2)
        if step == AT and guilty and not inside:
            (Path(folder) / "now").write_text(str(time.time()), encoding="utf-8")
            os.replace(Path(folder) / "now", Path(folder) / "fault")
            os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        elif step == AT and guilty:
            # The others come later, so that this rank is in the collective when it stops.
            stop = f"sleep 0.5; date +%s.%N > now; mv now fault; kill -STOP {os.getpid()}"
            subprocess.Popen(["sh", "-c", stop], cwd=folder)
        elif step == AT and inside:
            time.sleep(2.0)
        iteration(0.0)


def main() -> None:
    """Read trials, make them, and say what came of each."""
    task = json.load(sys.stdin)
    found = [_trial(size=task["size"], shift=task["shift"], **one) for one in task["trials"]]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
