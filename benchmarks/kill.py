"""`kill -9` at seeded moments, the same command again, and whether a loss is another than it was.

One run is left in peace; another of the same recipe is killed over and over, while it prepares,
trains, evaluates and saves. At the end their losses are compared to the bit.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import alone, say, write_result

RECIPE = """\
model: {layers: 3, width: 96, heads: 4, vocabulary_size: 512}
data: {include: ["json/**", "email/**"], sequence_length: 96, limit: 300kB}
training: {steps: 150, batch_size: 12, micro_batch_size: 4, device: cpu, seed: 3}
evaluation: {every: 20, rows: 16}
checkpoint: {every: 5}
samples: {count: 1, tokens: 8}
"""
STEPS = 150


def start(recipe: Path, out: Path) -> subprocess.Popen[bytes]:
    """`modicum train` in a process of its own, quiet."""
    command = [sys.executable, "-m", "modicum", "train", str(recipe), "--out", str(out), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    """The whole rows of a run's file so far."""
    path = out / f"{name}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def steps_done(out: Path) -> int:
    """The last step that the run has in its metrics; 0 before the first."""
    metrics = rows(out, "metrics")
    return metrics[-1]["step"] if metrics else 0


def kill_at(recipe: Path, out: Path, step: int, delay: float) -> int | None:
    """Kill the run `delay` seconds after `step`; where it was then, None if it had ended."""
    process = start(recipe, out)
    while steps_done(out) < step and process.poll() is None:
        time.sleep(0.002)
    time.sleep(delay)
    if process.poll() is not None:
        if process.returncode:
            raise SystemExit(f"the run ended with exit code {process.returncode}")
        return None
    process.kill()
    process.wait()
    return steps_done(out)


def main() -> None:
    """Kill, resume, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with alone(), tempfile.TemporaryDirectory() as folder:
        recipe, calm, killed = (Path(folder) / name for name in ("recipe.yaml", "calm", "killed"))
        recipe.write_text(RECIPE, encoding="utf-8")
        began = time.perf_counter()
        if start(recipe, calm).wait():
            raise SystemExit("the run that is left in peace failed")
        whole = time.perf_counter() - began
        # The first kill falls somewhere into start, import, tokenizing; the others into a step, an
        # evaluation or a save after the step that they wait for.
        moments = [(0, chance.uniform(0.1, 0.4) * whole)]
        steps = sorted(chance.sample(range(1, STEPS - 20), arguments.kills - 1))
        moments += [(step, chance.uniform(0.0, 0.03)) for step in steps]
        deaths = []
        for step, delay in moments:
            died = kill_at(recipe, killed, step, delay)
            say(f"killed after step {died}" if died is not None else "it had ended already")
            deaths += [died] if died is not None else []
        if start(recipe, killed).wait():
            raise SystemExit("the killed run could not be resumed")
        differences = {
            name: _differences(rows(calm, name), rows(killed, name), keys)
            for name, keys in {
                "metrics": ("step", "loss", "gradient_norm", "learning_rate", "tokens"),
                "evaluations": ("step", "loss", "tokens"),
                "samples": ("step", "prompt", "text"),
            }.items()
        }
    figures = {
        "kills": len(deaths),
        "killed_after_steps": deaths,
        "steps": STEPS,
        "differing_rows": sum(differences.values()),
        "differing_rows_by_file": differences,
    }
    say(f"{len(deaths)} kills, differing rows: {differences}")
    write_result("kill", figures, vars(arguments) | {"recipe": RECIPE})


def _differences(
    one: list[dict[str, Any]], other: list[dict[str, Any]], keys: tuple[str, ...]
) -> int:
    """Rows that differ to the bit in one of the keys, are missing or are there twice."""
    ours, theirs = ([tuple(row.get(key) for key in keys) for row in side] for side in (one, other))
    unequal = sum(a != b for a, b in zip(ours, theirs, strict=False))
    return unequal + abs(len(ours) - len(theirs))


if __name__ == "__main__":
    main()
