"""200 ms put into each kind of place of a run, and found in that place's row of `time`.

Small runs of one rank and of two are delayed at one kind of place each, and compared with runs that
are not delayed, which are made in between. What a row has more than in the middle one of those is
what was found of the delay there; how far those differ among themselves is the noise. A row other
than the delayed one strays where it moves by more than a tenth of the delay and more than twice
the noise. Runs that are killed resume, and delays of updates that are done again are lost work.

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

from modicum.core.clock import AGAIN, LOST, UNEXPLAINED, Clock, Row, group_of

Rows = dict[str, float]
STEPS, CLEAN = 20, 3
PLACES = ("data", "compute", "checkpoint", "evaluation", "tracking", "start-up")
AMONG_RANKS = ("wire", "slow rank")
OF_SLOW_RANK = "waiting for ranks"  # where rank 0 finds it
WORDS = ["the", "a", "small", "large", "red", "blue", "cat", "dog"]
WORDS += ["tree", "house", "sees", "likes", "finds", "near", "under", "over"]
RECIPE = f"""
data: {{path: data.jsonl, sequence_length: 32, validation_fraction: 0.1}}
model: {{layers: 2, width: 32, heads: 2, kv_heads: 1, vocabulary_size: 300}}
training: {{steps: {STEPS}, batch_size: 8, micro_batch_size: 4, learning_rate: 0.01}}
evaluation: {{every: 2, rows: 8}}
checkpoint: {{every: 2, asynchronous: false}}
samples: {{prompts: []}}
"""
OF_KILLED = ("--set", "checkpoint.every=10")


def inputs(folder: Path) -> Path:
    """A recipe, and data of 400 short documents; the recipe's file."""
    lines = (" ".join(WORDS[(n * 7 + p * (n % 5 + 1)) % 16] for p in range(18)) for n in range(400))
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    return recipe


def start(place: str, recipe: Path, out: Path, ranks: int, *more: str) -> tuple[Path, list[int]]:
    """Run the worker, as so many ranks; where rank 0 notes what it slept, and the exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        log = out.parent / f"{out.name}-{rank}.log"
        command = [sys.executable, str(HERE / "time_rows_worker.py"), place, str(log), "train"]
        command += ["--out", str(out), "--progress", "quiet", *more, str(recipe)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if ranks > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            numbers |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            environment |= {name: str(value) for name, value in numbers.items()}
            environment["MASTER_ADDR"] = "127.0.0.1"
        processes.append(subprocess.Popen(command, env=environment, stdout=sys.stderr))
    codes = [process.wait() for process in processes]
    return out.parent / f"{out.name}-{0 if place != 'slow rank' else 1}.log", codes


def slept(log: Path) -> float:
    """Seconds, of all delays together."""
    return sum(map(float, log.read_text().split())) if log.exists() else 0.0


def rows_of(out: Path) -> Rows:
    """The rows of a run, by group; the two of lost work apart."""
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    rows: Rows = {}
    for name, seconds in record["time"]["rows"].items():
        key = name if name in (LOST, AGAIN) else group_of(name)
        rows[key] = rows.get(key, 0.0) + seconds
    assert abs(sum(rows.values()) - record["seconds"]) < 1e-3
    return rows


def run(place: str, recipe: Path, ranks: int) -> tuple[Rows, float]:
    """Train with the delay at `place`; the rows, and what was slept."""
    with tempfile.TemporaryDirectory(dir=recipe.parent) as name:
        out = Path(name) / "run"
        kill = place in ("killed", "lost")
        more = OF_KILLED if kill else ()
        log, codes = start(place, recipe, out, ranks, *more)
        delayed = slept(log)
        assert (-signal.SIGKILL in codes) if kill else not any(codes), codes
        if kill:
            _, codes = start("none", recipe, out, ranks, *more)
            assert not any(codes), codes
        say(f"{ranks} rank(s), {place}: slept {delayed:.2f} s, {json.dumps(rows_of(out))}")
        return rows_of(out), delayed


def found(row: str, rows: Rows, slept: float, clean: list[Rows]) -> dict[str, Any]:
    """What of a delay is in its row, and which others have moved."""
    names = dict.fromkeys(name for each in [rows, *clean] for name in each)
    middle = {name: median(each.get(name, 0.0) for each in clean) for name in names}
    noise = {name: spread(each.get(name, 0.0) for each in clean) for name in names}
    moved = {name: rows.get(name, 0.0) - middle[name] for name in names}
    strays = [
        name
        for name in names
        if name != row and abs(moved[name]) > max(0.1 * slept, 2 * noise[name])
    ]
    return {
        "row": row,
        "slept": slept,
        "share": moved[row] / slept,
        "noise": noise[row] / slept,
        "moved": moved,
        "strays": strays,
        "unexplained": rows.get(UNEXPLAINED, 0.0) / sum(rows.values()),
    }


def spread(values: Iterable[float]) -> float:
    """The most less the least."""
    known = list(values)
    return max(known) - min(known)


def of_ranks(recipe: Path, ranks: int) -> dict[str, Any]:
    """All places of runs of so many ranks."""
    places = [*PLACES, *(AMONG_RANKS if ranks > 1 else ())]
    clean: list[Rows] = []
    delayed: dict[str, tuple[Rows, float]] = {}
    for number, place in enumerate(places):
        if number * CLEAN // len(places) >= len(clean):
            clean.append(run("none", recipe, ranks)[0])
        delayed[place] = run(place, recipe, ranks)
    result = {
        place: found(OF_SLOW_RANK if place == "slow rank" else place, rows, seconds, clean)
        for place, (rows, seconds) in delayed.items()
    }
    killed = [run("killed", recipe, ranks)[0] for _ in range(2)]
    result["lost work"] = found(LOST, *run("lost", recipe, ranks), killed)
    return {"noise": {name: spread(r.get(name, 0.0) for r in clean) for name in clean[0]}, **result}


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
        rows = rows_of(folder / part)
        shares[part] = rows.get(UNEXPLAINED, 0.0) / sum(rows.values())
        say(f"{part}: {json.dumps(rows)}")
    return shares


def main() -> None:
    """Run all, and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with alone(), tempfile.TemporaryDirectory() as name:
        recipe = inputs(Path(name))
        os.chdir(name)  # the recipe's data are named from here
        price = cost(recipe)
        say(json.dumps(price))
        demo = of_demo(recipe.parent)
        results = {f"ranks_{ranks}": of_ranks(recipe, ranks) for ranks in (1, 2)}
    delayed = [case for each in results.values() for key, case in each.items() if key != "noise"]
    figures = {
        "least_share": min(case["share"] for case in delayed),
        "largest_unexplained": max(*(case["unexplained"] for case in delayed), *demo.values()),
        "strays": sum(len(case["strays"]) for case in delayed),
        "cost": price,
        "demo": demo,
        **results,
    }
    write_result("time_rows", figures, {"steps": STEPS, "clean_runs": CLEAN})


if __name__ == "__main__":
    main()
