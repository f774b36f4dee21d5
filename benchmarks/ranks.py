"""The same run on one, two and four ranks, with DDP and with FSDP2: how far the losses differ.

Every run is `modicum train` with the same recipe: fp32, no dropout, several micro-batches an
update. Rows hold prompts that are not trained, so ranks count unequal numbers of tokens, and the
batch is no multiple of the ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import alone, say, write_result

STEPS = 50
RECIPE = """\
model: {{layers: 3, width: 72, heads: 4, kv_heads: 2, vocabulary_size: 400}}
data: {{path: {data}, column: answer, prompt_column: question, sequence_length: 64}}
training: {{steps: {steps}, batch_size: 10, micro_batch_size: 1, learning_rate: 3e-3, device: cpu,
  compile: none}}
evaluation: {{every: 25, rows: 9}}
checkpoint: {{every: 1000}}
samples: {{count: 0}}
"""
ARMS = {
    "one process": (1, []),
    "ddp, 2 ranks": (2, ["parallel.strategy=ddp"]),
    "ddp, 4 ranks": (4, ["parallel.strategy=ddp"]),
    "fsdp, 2 ranks": (2, ["parallel.strategy=fsdp"]),
    "fsdp, 4 ranks": (4, ["parallel.strategy=fsdp"]),
    "hybrid, 4 ranks": (4, ["parallel.strategy=fsdp", "parallel.shard=2"]),
}


def write_data(file: Path) -> None:
    """Questions of very different lengths, so that rows differ in how much of them is trained."""
    chance = random.Random(0)
    names = ["cat", "tree", "river", "stone", "cloud", "bread", "window", "paper"]
    with open(file, "w", encoding="utf-8") as handle:
        for number in range(600):
            words = " ".join(chance.choice(names) for _ in range(chance.choice((1, 4, 60))))
            answer = f"{chance.choice(names)} and {chance.choice(names)}, {number % 10}"
            handle.write(json.dumps({"question": words + "? ", "answer": answer}) + "\n")


def losses(recipe: Path, out: Path, ranks: int, settings: list[str]) -> dict[str, list[float]]:
    """Train, and read what came of it."""
    command = [sys.executable, "-m", "modicum", "train", str(recipe), "--out", str(out), "--quiet"]
    command += ["--ranks", str(ranks)] if ranks > 1 else []
    for setting in settings:
        command += ["--set", setting]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {code}")

    def column(name: str, key: str) -> list[float]:
        return [json.loads(line)[key] for line in (out / name).read_text().splitlines()]

    return {
        "loss": column("metrics.jsonl", "loss"),
        "gradient_norm": column("metrics.jsonl", "gradient_norm"),
        "validation_loss": column("evaluations.jsonl", "loss"),
        "tokens": column("metrics.jsonl", "tokens"),
    }


def largest(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    """Run every arm, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    with alone(), tempfile.TemporaryDirectory() as folder:
        data, recipe = Path(folder) / "data.jsonl", Path(folder) / "recipe.yaml"
        write_data(data)
        recipe.write_text(RECIPE.format(data=data, steps=steps), encoding="utf-8")
        found: dict[str, Any] = {}
        for place, (name, (ranks, settings)) in enumerate(ARMS.items()):
            found[name] = losses(recipe, Path(folder) / f"run{place}", ranks, settings)
            say(f"{name}: loss {found[name]['loss'][0]:.4f} to {found[name]['loss'][-1]:.4f}")
    one = found.pop("one process")
    differences = {
        name: {key: largest(values[key], one[key]) for key in one} for name, values in found.items()
    }
    figures = {
        "steps": steps,
        "largest_loss_difference": max(each["loss"] for each in differences.values()),
        "largest_relative_difference": differences,
        "first_and_last_loss": [one["loss"][0], one["loss"][-1]],
        "tokens_of_an_update": [min(one["tokens"]), max(one["tokens"])],
    }
    say(json.dumps(differences, indent=2))
    write_result("ranks", figures, {"recipe": RECIPE, "arms": ARMS})


if __name__ == "__main__":
    main()
