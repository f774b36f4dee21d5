"""What learning rate, batch size, epochs, warm-up and rank do to the loss, at sizes of minutes.

The figures of `docs/how-to/choosing-hyper-parameters.md`. Small models of code are trained on the
standard library's source files, and one of them is adapted to a package that it has not seen, in
full and with LoRA. One thing changes at a time; losses are of the validation after the last step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common import say, write_result

import modicum

SEEN = ["asyncio/**", "encodings/**", "pydoc_data/**"]
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
WIDTHS = (48, 96)
STEPS, BATCH, BASE_STEPS = 300, 16, 900
NEW: dict[str, Any] = {
    "model": {"layers": 2, "width": 96, "heads": 4, "vocabulary_size": 1024},
    "data": {"exclude": SEEN, "sequence_length": 64, "limit": "4MB"},
    "training": {"steps": STEPS, "batch_size": BATCH, "learning_rate": 3e-3, "warmup_steps": 20},
    "evaluation": {"every": 100_000, "rows": 256},
    "samples": {"count": 0},
    "checkpoint": {"every": 100_000},
}
LORA = {"method": "lora", "rank": 8}


class Runs:
    """Runs under one folder; a setting is trained once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def train(self, name: str, recipe: dict[str, Any]) -> modicum.TrainedRun:
        """Train a recipe, or read what it gave, if an earlier call of this script finished it."""
        out = self.folder / name
        if (out / "run.json").is_file():
            content = json.loads((out / "run.json").read_text())
            if content["status"] == "finished":
                return modicum.TrainedRun(content, out)
        run = modicum.train(modicum.plan(modicum.Recipe(**recipe)), out)
        say(f"{name}: {run['final']['validation_loss']:.4f}")
        return run

    def loss(self, name: str, recipe: dict[str, Any]) -> float:
        """The validation's loss at the end, in nats per token."""
        return round(float(self.train(name, recipe)["final"]["validation_loss"]), 4)

    def adapted(self, adapter: dict[str, Any] | None, **training: Any) -> dict[str, Any]:
        """A recipe that adapts the base model."""
        recipe = NEW | {
            "model": {"path": str(self.folder / "base")},
            "data": {"include": ["asyncio/**"], "sequence_length": 64, "validation_fraction": 0.2},
            "training": {"steps": 150, "batch_size": BATCH, "warmup_steps": 10} | training,
        }
        return recipe if adapter is None else recipe | {"adapter": adapter}


def new(width: int = 96, **training: Any) -> dict[str, Any]:
    """A recipe of a new model."""
    return NEW | {
        "model": NEW["model"] | {"width": width},
        "training": NEW["training"] | training,
    }


def by_size(runs: Runs) -> Iterator[dict[str, Any]]:
    """New models of two widths, at five learning rates."""
    for width in WIDTHS:
        for rate in RATES:
            recipe = new(width, learning_rate=rate)
            loss = runs.loss(f"size-{width}-{rate}", recipe)
            yield {"width": width, "learning_rate": rate, "loss": loss}


def by_method(runs: Runs) -> Iterator[dict[str, Any]]:
    """The base model adapted in full and with LoRA."""
    for method, adapter in (("full", None), ("lora", LORA)):
        for rate in (1e-4, *RATES, 1e-1):
            loss = runs.loss(f"{method}-{rate}", runs.adapted(adapter, learning_rate=rate))
            yield {"method": method, "learning_rate": rate, "loss": loss}


def by_batch(runs: Runs) -> Iterator[dict[str, Any]]:
    """As many rows in all, in few large updates or many small ones."""
    for batch, steps in ((4, 600), (16, 150), (64, 38)):
        for rate in (1e-3, 3e-3, 1e-2, 3e-2):
            recipe = runs.adapted(LORA, learning_rate=rate, batch_size=batch, steps=steps)
            loss = runs.loss(f"batch-{batch}-{rate}", recipe)
            yield {"batch_size": batch, "steps": steps, "learning_rate": rate, "loss": loss}


def by_epochs(runs: Runs) -> Iterator[dict[str, Any]]:
    """Few texts gone through many times: where the validation's loss begins to rise."""
    for method, adapter, rate in (("full", None, 3e-3), ("lora", LORA, 1e-2)):
        recipe = runs.adapted(adapter, steps=None, epochs=16, learning_rate=rate)
        recipe["data"] = recipe["data"] | {"limit": "150kB"}
        rows = modicum.plan(modicum.Recipe(**recipe)).counts["rows"]
        recipe["evaluation"] = {"every": -(-rows // BATCH), "rows": 256}
        run = runs.train(f"epochs-{method}", recipe)
        trained = {row["step"]: row["loss"] for row in run.metrics}
        for row in run.evaluations:
            yield {
                "method": method,
                "epoch": round(row["step"] * BATCH / run["data"]["rows"], 2),
                "training_loss": trained.get(row["step"]),
                "loss": round(row["loss"], 4),
            }


def by_warm_up(runs: Runs) -> Iterator[dict[str, Any]]:
    """A new model at its best learning rate and far above it, with and without a warm-up."""
    for rate in (3e-3, 1e-2):
        for steps in (0, 20, 100):
            recipe = new(learning_rate=rate, warmup_steps=steps)
            # The middle one is the setting of `by_size`.
            same = recipe == new(96, learning_rate=rate)
            loss = runs.loss(f"size-96-{rate}" if same else f"warm-up-{rate}-{steps}", recipe)
            yield {"learning_rate": rate, "warmup_steps": steps, "loss": loss}


def by_rank(runs: Runs) -> Iterator[dict[str, Any]]:
    """LoRA of several ranks, at two learning rates."""
    for rank in (1, 2, 4, 8, 16, 32):
        for rate in (3e-3, 1e-2):
            recipe = runs.adapted({"method": "lora", "rank": rank}, learning_rate=rate)
            run = runs.train(f"rank-{rank}-{rate}", recipe)
            loss = round(float(run["final"]["validation_loss"]), 4)
            trained = run["parameters"]["trainable"]
            yield {"rank": rank, "trained": trained, "learning_rate": rate, "loss": loss}


def main() -> None:
    """Train them all, one at a time; write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where runs are kept, and found again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modicum-hyper-") as temporary:
        runs = Runs(arguments.folder or Path(temporary))
        base = runs.loss("base", new(192, learning_rate=3e-3, steps=BASE_STEPS))
        parts: dict[str, Iterable[dict[str, Any]]] = {
            "method": by_method(runs),
            "rank": by_rank(runs),
            "epochs": by_epochs(runs),
            "batch": by_batch(runs),
            "size": by_size(runs),
            "warm_up": by_warm_up(runs),
        }
        figures = {name: list(part) for name, part in parts.items()}
    write_result("hyper_parameters", {"base_loss": base} | figures, {"new": NEW, "lora": LORA})


if __name__ == "__main__":
    main()
