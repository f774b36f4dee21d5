"""What `modicum.comm.watch` names, and when: seeded faults in real processes under bare DDP.

Ranks sleep in place of computing, so faults are the only reason why one is late. Each trial is a
run of its own: a rank that computes longer by a part, is paused in its computation or in a
collective, or is killed; and runs without a fault, in which any anomaly is a false alarm. With
`--null` nothing is injected and the same is asked: nothing may be found. The cost is that of
interleaved blocks of steps, with and without somebody who watches, in one run.

Not here: links (a port at a quarter of its rate, or down), evaluations, compile, 30 minutes at
rest. `--trials` sets how many of each kind; the specified experiment has 20, and 40 of slow ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import alone, say, write_result

SLOW = (0.1, 0.2, 0.3, 0.5, 1.0)
KINDS = [*(f"slow by {part:.0%}" for part in SLOW), "paused in compute", "paused in a collective"]
KINDS += ["killed", "nothing"]
CLASSES = {"killed": "dead", "paused in compute": "stopped", "paused in a collective": "stopped"}
STEP = 0.03  # seconds of compute
STEPS = 150


def rank_of_a_trial(task: dict[str, Any]) -> None:
    """A rank: compute that sleeps, DDP, and its own fault where it is the culprit."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import modicum.comm

    dist.init_process_group("gloo")
    rank, kind, fault = dist.get_rank(), task["kind"], task["at"]
    if kind == "cost":
        print(json.dumps(_cost()), flush=True)
        return
    watched = modicum.comm.watch(silent_seconds=30, late_seconds=60, record=task["record"])
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(32, 32)] * 1))
    guilty = rank == task["rank"] and not task["null"]
    for step in range(STEPS):
        longer = guilty and kind.startswith("slow") and step >= fault
        if guilty and step == fault and kind != "nothing" and not longer:
            _note(task, step)
            if kind == "paused in a collective":
                # The others come later, so that this rank is in the collective when it stops.
                subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -STOP {os.getpid()}"])
            elif not longer:
                os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        if kind == "paused in a collective" and step == fault and not guilty and not task["null"]:
            time.sleep(2.0)
        if longer and step == fault:
            _note(task, step)
        time.sleep(STEP * (1 + (task["part"] if longer else 0)))
        model(torch.ones(4, 32)).sum().backward()
        _note_step(task, rank, step)
    watched.close()


def _note(task: dict[str, Any], step: int) -> None:
    Path(task["record"]).with_suffix(".fault").write_text(json.dumps([step, time.time()]))


def _note_step(task: dict[str, Any], rank: int, step: int) -> None:
    """When rank 0 had made a step, so that seconds become iterations."""
    if rank == 0:
        with open(Path(task["record"]).with_suffix(".steps"), "a") as file:
            file.write(f"{time.time()}\n")


def _cost(blocks: int = 12, steps: int = 40) -> list[float]:
    """Of each pair of blocks, seconds with somebody who watches over seconds without."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import modicum.comm

    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    ratios = []
    for block in range(blocks):
        seconds = {}
        for watches in (True, False) if block % 2 else (False, True):
            watched = modicum.comm.watch() if watches else None
            begun = time.monotonic()
            for _ in range(steps):
                time.sleep(STEP)
                model(torch.ones(4, 32)).sum().backward()
            seconds[watches] = time.monotonic() - begun
            if watched is not None:
                watched.close()
        ratios.append(seconds[True] / seconds[False])
    return ratios


def launch(task: dict[str, Any], ranks: int) -> list[str]:
    """Run the ranks of a trial; what each printed. Ranks that are stopped are killed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, "--rank-of", json.dumps(task)]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | place | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + 90
    record = Path(task.get("record", ""))
    while time.monotonic() < end and any(one.poll() is None for one in processes):
        if task["kind"] in CLASSES and record.exists():
            break
        time.sleep(0.05)
    for one in processes:
        one.kill()
    return [one.communicate()[0] for one in processes]


def trial(kind: str, seed: int, ranks: int, folder: Path, *, null: bool) -> dict[str, Any]:
    """What was injected, what was found, and after how many iterations or seconds."""
    draws = random.Random(f"{kind} {seed}")
    record = folder / f"{kind} {seed}.jsonl"
    part = float(kind.split()[-1].rstrip("%")) / 100 if kind.startswith("slow") else 0.0
    task = {
        "kind": kind, "rank": draws.randrange(ranks), "at": draws.randrange(40, 70), "part": part,
        "record": str(record), "null": null,
    }  # fmt: skip
    launch(task, ranks)
    lines = record.read_text().splitlines() if record.exists() else []
    events = [json.loads(line) for line in lines]
    found = {"rank": task["rank"], "events": [(e["kind"], e["rank"], e["inside"]) for e in events]}
    fault = record.with_suffix(".fault")
    if fault.exists() and record.exists():
        step, when = json.loads(fault.read_text())
        seconds = record.stat().st_mtime - when  # of the last event; the first in these trials
        steps = [float(line) for line in record.with_suffix(".steps").read_text().split()]
        until = sum(stamp <= record.stat().st_mtime for stamp in steps)
        found |= {"seconds": seconds, "iterations": until - step}
    wanted = "slow" if kind.startswith("slow") else CLASSES.get(kind)
    first = events[0] if events else None
    right = first is not None and (first["kind"], first["rank"]) == (wanted, task["rank"])
    if kind.startswith("paused"):
        right = right and first is not None and first["inside"] == ("collective" in kind)
    found["right"] = not events if kind == "nothing" or null else right
    return found


def main() -> None:
    """Run the trials, and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2, help="of each kind")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--null", action="store_true", help="inject nothing")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        rank_of_a_trial(json.loads(given.rank_of))
        return
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with alone(), tempfile.TemporaryDirectory() as name:
        for seed in range(given.trials):
            for kind in KINDS:
                one = trial(kind, seed, given.ranks, Path(name), null=given.null)
                found[kind].append(one)
                say(f"{kind}, {seed}: {'right' if one['right'] else 'wrong'} {one}")
        printed = launch({"kind": "cost", "at": 0}, 2)
    table: dict[str, Any] = {}
    for kind, trials in found.items():
        table[kind] = {"trials": len(trials), "right": sum(one["right"] for one in trials)}
        for figure in ("seconds", "iterations"):
            values = [one[figure] for one in trials if one["right"] and figure in one]
            table[kind] |= {f"median {figure}": statistics.median(values)} if values else {}
    ratios = [value for line in printed if line.strip() for value in json.loads(line)]
    if ratios:
        table["step with over step without"] = statistics.median(ratios)
    print(json.dumps(table, indent=2))
    if not given.null:
        write_result("diagnosis", table, {"ranks": given.ranks, "trials": given.trials})


if __name__ == "__main__":
    main()
