"""200 ms put into each kind of place of a run, and found in that place's row of `time`.

Small runs of one rank and of two are delayed at a place of each kind. The rows of the clock are
looked at before and after each delay: what moved, of all delays of a kind together, is the share
that its own row got, and that others did. At the end the row in run.json has to hold at least
what was slept. So no run without delays is needed, and a busy machine makes rows longer and
changes no share. (Of the delay before a process has its clock there is the row at the end alone.)

Then rank 1 of two is late at each update, which rank 0 has to find under waiting for ranks, and
runs are killed after a checkpoint and start again: of what the killed process left in its files
between its last checkpoint and its last step all has to be lost work, and so has the delay of the
second start.

The cost of the clock is how often an update enters a row, times what that takes, over what an
update takes, in processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, alone, say, write_result

from modicum.core.clock import AGAIN, LOST, UNEXPLAINED, WAITING, Clock, Row

Rows = dict[str, float]
STEPS = 20
WORDS = ["the", "a", "small", "large", "red", "blue", "cat", "dog"]
WORDS += ["tree", "house", "sees", "likes", "finds", "near", "under", "over"]
RECIPE = f"""
data: {{path: DATA, sequence_length: 32, validation_fraction: 0.1}}
model: {{layers: 2, width: 32, heads: 2, kv_heads: 1, vocabulary_size: 300}}
training: {{steps: {STEPS}, batch_size: 8, micro_batch_size: 4, learning_rate: 0.01}}
evaluation: {{every: 5, rows: 8}}
checkpoint: {{every: 10, asynchronous: false}}
samples: {{prompts: []}}
"""


def inputs(folder: Path) -> Path:
    """A recipe, and data of 400 short documents; the recipe's file."""
    lines = (" ".join(WORDS[(n * 7 + p * (n % 5 + 1)) % 16] for p in range(18)) for n in range(400))
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.replace("DATA", str(folder / "data.jsonl")))
    return recipe


def start(mode: str, recipe: Path, out: Path, ranks: int) -> list[int]:
    """Run the worker, as so many ranks; the exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        log = out.parent / f"{mode}-{rank}.log"
        command = [sys.executable, str(HERE / "time_rows_worker.py"), mode, str(log), "train"]
        command += ["--out", str(out), "--progress", "quiet", str(recipe)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if ranks > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            numbers |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            environment |= {name: str(value) for name, value in numbers.items()}
            environment["MASTER_ADDR"] = "127.0.0.1"
        processes.append(subprocess.Popen(command, env=environment, stdout=sys.stderr))
    return [process.wait() for process in processes]


def log_of(folder: Path, mode: str, rank: int = 0) -> list[dict[str, Any]]:
    """What the worker noted: of each delay `row`, `slept` and `moved`."""
    lines = (folder / f"{mode}-{rank}.log").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def rows_of(out: Path) -> Rows:
    """The rows of a run, which sum to its seconds."""
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    rows: Rows = record["time"]["rows"]
    assert abs(sum(rows.values()) - record["seconds"]) < 1e-3
    say(f"{out.name}: {json.dumps({name: round(value, 3) for name, value in rows.items()})}")
    return rows


def unexplained(rows: Rows) -> float:
    """The share of a run's time that no row claims."""
    return rows.get(UNEXPLAINED, 0.0) / sum(rows.values())


def everywhere(recipe: Path, ranks: int, folder: Path) -> dict[str, Any]:
    """Delays of each kind in one run: their shares in their own rows, and in others."""
    codes = start("everywhere", recipe, folder / "run", ranks)
    assert not any(codes), codes
    rows, lines = rows_of(folder / "run"), log_of(folder, "everywhere")
    found = {}
    for row in dict.fromkeys(line["row"] for line in lines):
        of_row = [line for line in lines if line["row"] == row]
        slept = sum(line["slept"] for line in of_row)
        moved: Rows = {}
        for name, seconds in ((n, s) for line in of_row for n, s in line["moved"].items()):
            moved[name] = moved.get(name, 0.0) + seconds
        # Before the process has a clock there is nothing to look at but the row at the end.
        own = moved.get(row, 0.0) if moved else rows[row]
        found[row] = {
            "delays": len(of_row),
            "slept": slept,
            "share": min(own, rows[row]) / slept if moved else min(1.0, own / slept),
            "elsewhere": max([0.0, *(s for name, s in moved.items() if name != row)]) / slept,
            "row": rows[row],
        }
    return {"rows": found, "unexplained": unexplained(rows)}


def slow_rank(recipe: Path, folder: Path) -> dict[str, float]:
    """Rank 1 is late in each update: the share that rank 0 waited for it."""
    codes = start("slow rank", recipe, folder / "run", 2)
    assert not any(codes), codes
    rows = rows_of(folder / "run")
    slept = sum(line["slept"] for line in log_of(folder, "slow rank", 1))
    return {"slept": slept, "share": rows[WAITING] / slept, "unexplained": unexplained(rows)}


def killed(recipe: Path, ranks: int, folder: Path) -> dict[str, float]:
    """A run that is killed and starts again: the shares that are found as lost work."""
    out = folder / "run"
    codes = start("killed", recipe, out, ranks)
    assert -signal.SIGKILL in codes, codes
    steps = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    manifests = sorted(out.glob("checkpoints/step-*/manifest.json"))
    saved = json.loads(manifests[-1].read_text(encoding="utf-8"))
    left = json.loads(steps[-1])["elapsed"] - saved["notes"]["seconds"]
    delays = log_of(folder, "killed")[: len(steps) - saved["step"]]
    codes = start("again", recipe, out, ranks)
    assert not any(codes), codes
    rows = rows_of(out)
    slept = sum(line["slept"] for line in delays)
    started = sum(line["slept"] for line in log_of(folder, "again"))
    return {
        "slept": slept,
        "share": min(1.0, rows[LOST] / slept),
        "of_what_was_left": rows[LOST] / left,
        "share_of_start": min(1.0, rows[AGAIN] / started),
        "unexplained": unexplained(rows),
    }


def of_ranks(recipe: Path, ranks: int) -> dict[str, Any]:
    """All experiments with so many ranks."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=recipe.parent) as name:
        found["everywhere"] = everywhere(recipe, ranks, Path(name))
    with tempfile.TemporaryDirectory(dir=recipe.parent) as name:
        found["killed"] = killed(recipe, ranks, Path(name))
    if ranks > 1:
        with tempfile.TemporaryDirectory(dir=recipe.parent) as name:
            found["slow rank"] = slow_rank(recipe, Path(name))
    say(json.dumps(found, indent=2))
    return found


def cost(recipe: Path) -> dict[str, float]:
    """How often an update of one rank enters a row, what that takes, and the share of it."""
    import modicum
    from modicum.core.ranks.ranks import Ranks
    from modicum.recipe_yaml import load

    clock, entered, ends = Clock(), 0, []
    begun, times = time.process_time(), 200_000
    for _ in range(times):
        with clock("data"):
            pass
    once = (time.process_time() - begun) / times
    enter = Row.__enter__

    def count(row: Row) -> None:
        nonlocal entered
        entered += 1
        enter(row)

    def listener(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            ends.append((entered, time.process_time()))

    Row.__enter__ = count  # type: ignore[method-assign]
    try:
        far = ("training.steps=60", "evaluation.every=100", "checkpoint.every=100")
        plan = modicum.plan(load(recipe, far))
        modicum.train(plan, recipe.parent / "cost", listener=listener, ranks=Ranks())
    finally:
        Row.__enter__ = enter  # type: ignore[method-assign]
    pairs = list(pairwise(ends[10:]))  # those before warm up
    entries = median(after[0] - before[0] for before, after in pairs)
    update = median(after[1] - before[1] for before, after in pairs)
    return {"entries": entries, "seconds": once, "update": update, "share": entries * once / update}


def of_demo(folder: Path) -> dict[str, float]:
    """The share of each part of the demo that no row claims, with fewer steps."""
    shares = {}
    for part, more in (("demo-pretrain", []), ("demo-adapt", ["model.path=demo-pretrain"])):
        command = [sys.executable, "-m", "modicum", "train", part, "--out", part]
        for change in (f"training.steps={STEPS}", *more):
            command += ["--set", change]
        subprocess.run([*command, "--progress", "quiet"], cwd=folder, check=True, stdout=sys.stderr)
        shares[part] = unexplained(rows_of(folder / part))
    return shares


def shares(results: Iterable[dict[str, Any]]) -> Iterable[float]:
    """Every share that has to be found."""
    for each in results:
        yield from (row["share"] for row in each["everywhere"]["rows"].values())
        killed = each["killed"]
        yield from (killed["share"], killed["share_of_start"], killed["of_what_was_left"])
        if "slow rank" in each:
            yield each["slow rank"]["share"]


def figures(price: Rows, demo: Rows, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is promised, and all that it is made of."""
    found = list(results.values())
    return {
        "least_share": min(shares(found)),
        "largest_elsewhere": max(
            row["elsewhere"] for each in found for row in each["everywhere"]["rows"].values()
        ),
        "largest_unexplained": max(
            *(case["unexplained"] for each in found for case in each.values()), *demo.values()
        ),
        "cost": price,
        "demo": demo,
        **results,
    }


def main() -> None:
    """Run all, and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with alone(), tempfile.TemporaryDirectory() as name:
        recipe = inputs(Path(name))
        price = cost(recipe)
        say(json.dumps(price))
        demo = of_demo(recipe.parent)
        results = {f"ranks_{ranks}": of_ranks(recipe, ranks) for ranks in (1, 2)}
    write_result("time_rows", figures(price, demo, results), {"steps": STEPS})


if __name__ == "__main__":
    main()
