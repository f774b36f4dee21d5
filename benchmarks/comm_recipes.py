"""Recipes that differ in their exchange alone, at two ranks: the trainer's part of `comm.py`."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import say

from modicum.core.errors import InputError
from modicum.core.units import parse_bytes
from modicum.proofs.comm.links import in_tc, shaped, tried_link
from modicum.proofs.comm.step_bounds import StepRow as Row
from modicum.proofs.comm.step_bounds import WorldArms as Arms
from modicum.proofs.comm.step_bounds import break_even
from modicum.proofs.ranks import at_ranks

RECIPES, BENCH = "modicum.proofs.comm.recipe_bench", "modicum.proofs.comm.curve_bench"


def recipes_of(data: Path, steps: int, size: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A run for every exchange, which differ in nothing else."""
    values = {
        "model": dict(size["model"]),
        "data": {"path": str(data), "column": "text", "sequence_length": size["tokens"]},
        "training": {"steps": steps, "batch_size": size["rows"], "compile": "none",
                     "device": "cpu", "precision": "fp32"},
        "parallel": {"strategy": "ddp", "bucket": size["bucket"]},
        "evaluation": {"every": 10_000, "rows": 4},
        "checkpoint": {"every": 10_000},
        "samples": {"count": 0},
        "watchdog": None,
    }  # fmt: skip
    rank = size["rank"]
    ways: dict[str, dict[str, Any]] = {
        "dense_fp32": {"method": "dense_sums"},
        "dense_bf16": {"method": "dense_sums", "dtype": "bf16"},
        "dense_fp16": {"method": "dense_sums", "dtype": "fp16"},
        "powersgd": {"method": "powersgd", "rank": rank},
        "acp_sgd": {"method": "acp_sgd", "rank": rank},
        "dear": {"method": "dear", "bucket_bytes": parse_bytes(size["bucket"])},
        "sdp4bit": {"method": "sdp4bit", "ranks_per_node": 1},
    }
    found = {label: {**values, "comm": comm} for label, comm in ways.items()}
    found["sdp4bit"]["parallel"] = {"strategy": "zero", "bucket": size["bucket"]}
    return found


FULL_RUN = {"model": {"layers": 4, "width": 256, "heads": 8, "vocabulary_size": 400},
            "tokens": 128, "rows": 16, "bucket": "2MB", "rank": 32}  # fmt: skip
QUICK_RUN = {"model": {"layers": 2, "width": 64, "heads": 4, "vocabulary_size": 300},
             "tokens": 32, "rows": 4, "bucket": "100KB", "rank": 4}  # fmt: skip


def write_data(file: Path) -> None:
    """Lines of words, drawn with one seed."""
    chance, words = random.Random(0), ["cat", "tree", "river", "stone", "cloud", "bread", "window"]
    with open(file, "w", encoding="utf-8") as handle:
        lines = (" ".join(chance.choices(words, k=40)) for _ in range(1500))
        handle.writelines(json.dumps({"text": line}) + "\n" for line in lines)


def in_the_trainer(
    size: Mapping[str, Any],
    steps: int,
    ratios: Mapping[str, tuple[float, ...]],
    by_port: bool,
    settled: Callable[[], float],
) -> Row:
    """Two ranks of `modicum train` with each recipe, at every ratio.

    Args:
        ratios: those of links that are pretended in any case, and of those shaped where possible.
        settled: waits until nothing else runs here, and gives the load.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.jsonl"
        write_data(data)
        recipes = recipes_of(data, steps, size)
        settled()
        compute, gradients = by_itself(recipes["dense_fp32"], size["rows"] // 2)
        message = least_message(recipes) if by_port else 0
        say(f"a step of the trainer by itself: {compute:.3f} s")
        found: Row = {}
        for kind, asked in ratios.items():
            for ratio in asked:
                rate = gradients / (ratio * compute)
                load = settled()
                shape = Shape.of(rate, message) if kind == "shaped" and by_port else Shape()
                rows, link = _trained(recipes, rate, shape)
                say(f"trainer, {shape.kind} link, ratio {ratio:g}")
                found[str(ratio)] = {
                    **shape.as_json(),
                    "megabits": rate * 8e-6,
                    "link": link,
                    "load": load,
                    "none": compute,
                    "arms": {k: _in_recipe(row, compute, link) for k, row in rows.items()},
                }
    took: dict[float, dict[str, float]] = {
        float(ratio): {label: row["step"] for label, row in point["arms"].items()}
        for ratio, point in found.items()
    }
    labels = [label for label in recipes if label != "dense_fp32"]
    gains = {label: break_even(took, label) for label in labels}
    return {"compute": compute, "ratios": found, "break_even": gains}


def by_itself(recipe: Mapping[str, Any], rows: int) -> tuple[float, float]:
    """Seconds of a step in which nothing travels, both ranks computing; bytes of gradients.

    Args:
        rows: a rank's in an update.
    """
    lone = {key: value for key, value in recipe.items() if key not in ("comm", "parallel")}
    lone["training"] = lone["training"] | {"batch_size": rows}
    found = _at_two({"recipes": {"none": lone}, "alone": True})["none"]
    said = _at_two({"recipes": {"dense": recipe}})["dense"]["said"]
    return median(found["seconds"]), said


def _at_two(task: Mapping[str, Any]) -> Row:
    found: Row = at_ranks(f"{RECIPES}:trained", 2, task, seconds=7200)[0]
    return found


def least_message(recipes: Arms) -> int:
    """Bytes of a call in two updates of the recipe whose calls are the shortest, in the mean."""
    short = {
        label: {**recipe, "training": {**recipe["training"], "steps": 2}}
        for label, recipe in recipes.items()
    }
    rows = _at_two({"recipes": short}).values()
    return int(min(row["bytes"] / row["calls"] for row in rows if row["calls"]))


@dataclass(frozen=True)
class Shape:
    """How a link of a rate is shaped, as it was tried; without a burst it is pretended.

    Args:
        cold_off: by what part a cold message was off the time of its bytes.
        why_not: why it is pretended, where a shaped one was asked for.
    """

    burst: int = 0
    cold_off: float | None = None
    why_not: str | None = None

    @classmethod
    def of(cls, rate: float, message: int) -> Shape:
        """A link of so many bytes a second for messages of so many bytes and more."""
        try:
            return cls(*tried_link(2, rate, message))
        except InputError as error:
            say(f"the link is pretended: {error}")
            return cls(why_not=str(error))

    @property
    def kind(self) -> str:
        """What kind of link it is."""
        return "shaped" if self.burst else "pretended"

    def as_json(self) -> Row:
        """What a result says of it."""
        found: Row = {"link_is": self.kind}
        found |= {"burst": self.burst, "cold_off": self.cold_off} if self.burst else {}
        return found | ({"not_shaped": self.why_not} if self.why_not else {})

    def on_it(self, rate: float, function: str, task: Mapping[str, Any]) -> Any:
        """What a function of the bench of recipes gives at two ranks on such a link."""
        name = function if ":" in function else f"{RECIPES}:{function}"
        if not self.burst:
            return at_ranks(name, 2, {**task, "rate": rate}, seconds=7200)[0]
        [found] = shaped(2, [in_tc(rate)], name, [task], bursts=[self.burst], seconds=7200)
        return found


def _trained(recipes: Arms, rate: float, shape: Shape) -> tuple[Row, dict[str, float]]:
    """What came of each recipe, and the link, as it was measured."""
    link = {"rate": rate, "latency": 0.0}
    if shape.burst:
        link = shape.on_it(rate, f"{BENCH}:curve", {"arms": {}, "model": {}})["link"]
    return shape.on_it(rate, "trained", {"recipes": recipes}), link


def on_the_wire(row: Row, link: Mapping[str, float]) -> float:
    """Seconds of an update's own calls on a link: each step of them, and the bytes."""
    return float(link["latency"] * row["ring_steps"] + row["bytes"] / link["rate"])


def _in_recipe(row: Row, compute: float, link: Mapping[str, float]) -> Row:
    step, wire = median(row["seconds"]), on_the_wire(row, link)
    return {
        "step": step,
        "range": [min(row["seconds"]), max(row["seconds"])],
        "wire": wire,
        "bound": max(compute, wire),
        "over_bound": step / max(compute, wire),
        "bytes": row["bytes"],
        "calls": row["calls"],
        "ledger": row["said"],
        "bytes_are_ledger": row["bytes"] == row["said"],
        "loss": row["loss"],
    }
