"""Runs of two hosts to which something happens: what is said of it, when, and how they resume.

Each host is a network namespace with a name of its own, where one rank trains as under torchrun; a
cable joins them. The fault comes at a step, or once the ranks have met. Then the same command runs
again without it. `python -m` this module is the process between the hosts, or one of the ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError, Interrupted, ModicumError
from modicum.proofs.comm.fault_moments import strike_at
from modicum.proofs.comm.links import apart, in_words, make_hosts

CUT, PAUSED, KILLED, NAN, OTHER = "cut", "paused", "killed", "nan", "other recipe"
FAULTS = (CUT, PAUSED, KILLED, NAN, OTHER)
NOTHING = "nothing"
_MODULE = "modicum.proofs.comm.faulty_runs"  # also where it runs as `__main__`
STOP_AFTER = 2  # updates after a gradient that is no number, in a run that is to resume
STARTED_SECONDS, WITHIN_SECONDS = 180.0, 45.0  # until the fault, and after it
_INSIDE = (
    'exec ip netns exec md$RANK unshare --uts sh -c \'hostname host-$RANK; exec "$@"\' sh "$@"'
)
FaultFinding = dict[str, Any]


def trial(
    kind: str,
    rank: int,
    step: int,
    recipe: Mapping[str, Any],
    *,
    delay: float = 0.0,
    moment: str | None = None,
) -> FaultFinding:
    """Two hosts train, one of them has the fault, and the run resumes.

    Args:
        kind: one of `FAULTS`, or `NOTHING`.
        rank: to which it happens.
        step: after which update; 0: when the ranks watch each other, before
            anything is planned.
        recipe: of the run, as plain values.
        delay: seconds from then until the cable is pulled.
        moment: one of `MOMENTS`, where the fault comes then and not after a step.

    Returns:
        `seconds` from the fault to the sentence on the last host that should say one (None: not
        all did), `ended` to the end of the last process (None: some had to be killed), `codes` of
        the ranks, `said` by each host, and `outcome`: a digest of the run once it has resumed.

    Raises:
        InputError: such hosts cannot be made here, or a run failed otherwise.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = {"kind": kind, "rank": rank, "step": step, "recipe": dict(recipe), "delay": delay}
        task["moment"] = moment
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        command = f"exec {sys.executable} -m {_MODULE} between {folder}"
        done = subprocess.run(apart(command), capture_output=True, text=True, check=False)
        if not (folder / "found.json").exists():
            raise InputError(f"two hosts could not be made here: {done.stderr.strip()[-2000:]}")
        found: FaultFinding = json.loads((folder / "found.json").read_bytes())
    return found


def between(folder: Path) -> FaultFinding:
    """Make the hosts in this process's namespaces, and do the task of a folder."""
    task = json.loads((folder / "task.json").read_bytes())
    make_hosts(2)
    found = _attempt(folder, "first", task, task["kind"])
    if task["kind"] in (NAN, NOTHING):
        found["outcome"] = outcome(folder / "run")
        if task["kind"] == NAN:  # the same again, interrupted soon after it
            (folder / "run").rename(folder / "unbroken")
            _attempt(folder, "second", task, NAN, stop=True)
    if task["kind"] != NOTHING:
        in_words(f"ip -n mdsw link set mdp{task['rank']} up")
        again = _attempt(folder, "again", task, NOTHING)
        found["resumed"], resumed = again["codes"], outcome(folder / "run")
        found["to_the_bit"] = resumed == found["outcome"] if task["kind"] == NAN else None
        found["outcome"] = resumed
    return found


# The hosts


def _attempt(
    folder: Path, name: str, task: Mapping[str, Any], kind: str, *, stop: bool = False
) -> FaultFinding:
    """Start a rank on each host, do what is to happen, and follow what they say until they end."""
    place = folder / name
    place.mkdir()
    whole = {**task, "kind": kind, "folder": str(folder / "run"), "stop": stop}
    (place / "task.json").write_text(json.dumps(whole), encoding="utf-8")
    ranks = [_start(place, rank, name) for rank in range(2)]
    guilty, fault = int(task["rank"]), place / "fault"
    when, heard = None, dict[str, float]()
    end = time.time() + STARTED_SECONDS
    try:
        while any(rank.poll() is None for rank in ranks) and time.time() < end:
            time.sleep(0.02)
            if when is None and fault.exists() and fault.stat().st_size:
                when = float(fault.read_text(encoding="utf-8"))
                if kind == CUT:
                    time.sleep(float(task["delay"]))
                    in_words(f"ip -n mdsw link set mdp{guilty} down")
                    when = time.time()
                end = time.time() + (STARTED_SECONDS if kind == NAN else WITHIN_SECONDS)
            for rank in range(2):
                if (
                    when is not None
                    and str(rank) not in heard
                    and _names(place, kind, rank, guilty)
                ):
                    heard[str(rank)] = time.time() - when
        ended = None if any(rank.poll() is None for rank in ranks) or when is None else time.time()
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
    asked = [rank for rank in range(2) if kind != KILLED or rank != guilty]
    seconds = [heard[str(rank)] for rank in asked if str(rank) in heard]
    return {
        "kind": kind,
        "rank": guilty,
        "step": task["step"],
        "moment": task["moment"],
        "seconds": max(seconds) if len(seconds) == len(asked) else None,
        "ended": ended - when if ended is not None and when is not None else None,
        "codes": [rank.returncode for rank in ranks],
        "said": [_said(place, rank)[-1500:] for rank in range(2)],
    }


def _start(place: Path, rank: int, name: str) -> subprocess.Popen[bytes]:
    """A rank on its host; what it says goes to a file."""
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": {"first": "29511", "second": "29512"}.get(name, "29513"),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    words = ["sh", "-c", _INSIDE, "sh", sys.executable, "-m", _MODULE, "rank", str(place)]
    with open(place / f"said-{rank}", "wb") as file:
        return subprocess.Popen(
            words, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )


def _said(place: Path, rank: int) -> str:
    return (place / f"said-{rank}").read_text(encoding="utf-8", errors="replace")


def _names(place: Path, kind: str, rank: int, guilty: int) -> bool:
    """Whether a host has said who it was, or of a gradient that is no number, what.

    A host that no longer reaches rank 0 can only say that it hears nothing of it.
    """
    who = rf"rank {guilty}\b"
    if kind == CUT:
        who = rf"rank {1 - rank}\b"
    pattern = r"not finite, skipped" if kind == NAN else who
    lines = [line for line in _said(place, rank).splitlines() if line.startswith("modicum: ")]
    return any(re.search(pattern, line) for line in lines)


def outcome(folder: Path) -> str:
    """A digest of all of a run that is a function of its recipe and ranks; empty: it did not end.

    Seconds are left out.
    """
    record = folder / "run.json"
    if not record.exists() or json.loads(record.read_bytes())["status"] != "finished":
        return ""
    digest = hashlib.sha256()
    for name, keys in (("metrics", ("step", "loss", "gradient_norm")), ("evaluations", ("loss",))):
        for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            digest.update(repr([json.loads(line).get(key) for key in keys]).encode())
    for file in sorted(folder.glob("model/*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# A rank


def rank_of(place: Path) -> int:
    """Train as a rank, to which the fault happens if it is for this one; the exit code."""
    from modicum.core.ranks.ranks import joined
    from modicum.recipe import Recipe
    from modicum.trainer import continued, train
    from modicum.trainer.rank_watch import watched_start

    task = json.loads((place / "task.json").read_bytes())
    guilty = int(os.environ["RANK"]) == task["rank"]
    if guilty and task["moment"] is not None and task["kind"] != NOTHING:
        strike_at(task["moment"], lambda: _fault(task["kind"], place))
    values = dict(task["recipe"])
    if guilty and task["kind"] == OTHER:
        values["training"] = values["training"] | {"learning_rate": 7e-4}
    folder = Path(task["folder"])

    def listener(event: Mapping[str, Any]) -> None:
        if event["event"] == "warning":
            print(f"modicum: {event['message']}", file=sys.stderr, flush=True)
        if event["event"] == "step" and guilty and task["moment"] is None:
            if event["step"] == task["step"]:
                _fault(task["kind"], place)
            elif task["stop"] and event["step"] == task["step"] + STOP_AFTER:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        recipe = Recipe(**values)
        with joined() as ranks:
            ranks.gather(True)
            if guilty and task["kind"] == OTHER:
                _fault(OTHER, place)
            with watched_start(recipe, folder, ranks) as watched:  # as `modicum train` does
                begins = not task["step"] and task["moment"] is None
                if guilty and begins and task["kind"] != OTHER:
                    _fault(task["kind"], place)
                with watched.marked():
                    plan = continued(recipe, folder, ranks=ranks)
                train(plan, folder, ranks=ranks, listener=listener)
    except ModicumError as error:
        print(f"modicum: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _fault(kind: str, place: Path) -> None:
    """Say when, and do it, where it is this rank that does it."""
    if kind == NOTHING:
        return
    (place / "now").write_text(str(time.time()), encoding="utf-8")
    os.replace(place / "now", place / "fault")
    if kind in (KILLED, PAUSED):
        os.kill(os.getpid(), signal.SIGKILL if kind == KILLED else signal.SIGSTOP)
    if kind == NAN:
        _spoil_one_loss()


def _spoil_one_loss() -> None:
    """The next backward pass of this rank, and no later one, begins at a number that is none."""
    import torch

    plain = torch.Tensor.backward

    def spoiled(loss: Any, *arguments: Any, **options: Any) -> None:
        setattr(torch.Tensor, "backward", plain)  # noqa: B010 - a method's type is not assignable
        plain(loss * float("nan"), *arguments, **options)

    setattr(torch.Tensor, "backward", spoiled)  # noqa: B010


def right(found: FaultFinding, calm: str, within: float = 10.0) -> list[str]:
    """What is wrong with a trial, in words; nothing where it is as it should be.

    Args:
        calm: the digest of a run to which nothing happened.
        within: seconds to the sentence, and to the end.
    """
    kind, codes = found["kind"], found["codes"]
    wrong = []
    if found["seconds"] is None or found["seconds"] > within:
        wrong.append(f"the sentence came after {found['seconds']} s")
    if kind != NAN and (found["ended"] is None or found["ended"] > within):
        wrong.append(f"all had ended after {found['ended']} s")
    wanted = {NAN: 0, OTHER: InputError.exit_code}.get(kind, Interrupted.exit_code)
    left = [c for rank, c in enumerate(codes) if kind in (CUT, NAN, OTHER) or rank != found["rank"]]
    if any(code != wanted for code in left):
        wrong.append(f"exit codes {codes}")
    if not (found["to_the_bit"] if kind == NAN else found["outcome"] == calm):
        wrong.append("it did not resume to the bit")
    return wrong


def main(arguments: Sequence[str]) -> int:
    """The process between the hosts, or a rank."""
    place = Path(arguments[1])
    if arguments[0] == "rank":
        return rank_of(place)
    (place / "found.json.new").write_text(json.dumps(between(place)), encoding="utf-8")
    os.replace(place / "found.json.new", place / "found.json")
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread of gloo may still want the interpreter
