"""Recipes that differ in their exchange alone, at two ranks: the trainer's part of `comm.py`."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from common import say

from modicum.core.errors import InputError
from modicum.core.units import parse_bytes
from modicum.proofs.comm.links import shaped
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
    size: Mapping[str, Any], steps: int, ratios: Mapping[str, tuple[float, ...]], by_port: bool
) -> Row:
    """Two ranks of `modicum train` with each recipe, at every ratio.

    Args:
        ratios: those of links that are pretended in any case, and of those shaped where possible.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.jsonl"
        write_data(data)
        recipes = recipes_of(data, steps, size)
        compute, gradients = by_itself(recipes["dense_fp32"], size["rows"] // 2)
        say(f"a step of the trainer by itself: {compute:.3f} s")
        found: Row = {}
        for kind, asked in ratios.items():
            for ratio in asked:
                rate = gradients / (ratio * compute)
                rows, link, used = _trained(recipes, rate, kind == "shaped" and by_port)
                say(f"trainer, {used} link, ratio {ratio:g}")
                found[str(ratio)] = {
                    "link_is": used,
                    "megabits": rate * 8e-6,
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


def _trained(recipes: Arms, rate: float, by_port: bool) -> tuple[Row, dict[str, float], str]:
    """What came of each recipe, the link as it was measured, and what kind it is."""
    if by_port:
        said, bursts = [f"{round(rate * 8 / 1000)}kbit"], [max(3_200, round(rate / 1000))]
        bare: list[Row] = [{"arms": {}, "model": {}}]
        try:
            [measured] = shaped(2, said, f"{BENCH}:curve", bare, bursts=bursts)
        except InputError as error:
            say(f"the link is pretended: {error}")
        else:
            tasks = [{"recipes": recipes}]
            name = f"{RECIPES}:trained"
            [rows] = shaped(2, said, name, tasks, bursts=bursts, seconds=7200)
            return rows, measured["link"], "shaped"
    return _at_two({"recipes": recipes, "rate": rate}), {"rate": rate}, "pretended"


def _in_recipe(row: Row, compute: float, link: Mapping[str, float]) -> Row:
    step, wire = median(row["seconds"]), row["bytes"] / link["rate"]
    return {
        "step": step,
        "range": [min(row["seconds"]), max(row["seconds"])],
        "wire": wire,
        "bound": max(compute, wire),
        "over_bound": step / max(compute, wire),
        "bytes": row["bytes"],
        "ledger": row["said"],
        "bytes_are_ledger": row["bytes"] == row["said"],
        "loss": row["loss"],
    }
