"""Is the plan's forecast of memory true? Train a grid of recipes, each in a process of its own.

Tensor bytes are the meter's (`peak_bytes.measured` of run.json). Process bytes are the largest
resident size of a process that does everything (it reads the data, trains a tokenizer, plans,
trains some steps, evaluates, saves, exports), less what the plan says that Python and torch hold.

    python benchmarks/prediction.py                        # the full grid
    python benchmarks/prediction.py --quick --output FILE  # three of it, of over 200 MB of tensors
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import alone, say, write_result

from modicum.cli.allocator import tuned
from modicum.core.files import write_json

QUICK = ("default model", "bf16", "lora, bf16")
LARGE_BYTES = 200 * 10**6  # a forecast's error is promised from so many bytes of tensors on
STEPS = 8
QUICK_STEPS = 4
COMMON: dict[str, Any] = {
    "data.limit": "1MB",
    "training.steps": STEPS,
    "training.batch_size": 8,
    "samples.count": 1,
    "evaluation.rows": 8,
    "checkpoint.every": 4,  # so that steps meet the copy of a checkpoint that is being written
}
LARGE = {"model.width": 384, "model.layers": 6, "model.heads": 6, "model.vocabulary_size": 8192}
ADAPTED: dict[str, Any] = {"adapter.method": "lora", "adapter.rank": 8}
HALF = {"training.precision": "bf16"}
ACCUMULATED = {"training.micro_batch_size": 2}
FULL: dict[str, dict[str, Any]] = {
    "tiny": {"model.width": 64, "model.layers": 2, "data.sequence_length": 64},
    "default model": {},
    "all of the library as data": {"data.limit": None},
    "accumulation": ACCUMULATED,
    "recompute": {"training.recompute": "blocks"},
    "bf16": HALF,
    "no boundaries": {"data.boundaries": False},
    "long rows": {"data.sequence_length": 1024, "training.batch_size": 2},
    "16 rows": {"training.batch_size": 16},
    "large vocabulary": {"model.vocabulary_size": 16384, **ACCUMULATED},
    "large vocabulary, untied": {
        "model.vocabulary_size": 16384,
        "model.tied_embeddings": False,
        **ACCUMULATED,
    },
    "14 M parameters": {**LARGE, "training.batch_size": 4},
    "30 M parameters, a row at a time": {
        "model.width": 512,
        "model.layers": 9,
        "training.batch_size": 2,
        "training.micro_batch_size": 1,
    },
}
LORA: dict[str, dict[str, Any]] = {
    "lora": ADAPTED,
    "lora, bf16": {**ADAPTED, **HALF},
    "lora, accumulation": {**ADAPTED, **ACCUMULATED},
    "lora, recompute": {**ADAPTED, "training.recompute": "blocks"},
    "lora, dropout": {**ADAPTED, "adapter.dropout": 0.1, **ACCUMULATED},
}
BASE: dict[str, Any] = {**LARGE, "data.sequence_length": 256, "training.batch_size": 1}


def main() -> None:
    """Run the grid, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--output", type=Path, help="write the result there, not among the others")
    asked = parser.parse_args()
    rows = []
    with alone(), tempfile.TemporaryDirectory(prefix="modicum-prediction-") as temporary:
        folder = Path(temporary)
        _in_process({**COMMON, **BASE, "training.steps": 1}, folder / "base")
        adapt = {"model.path": str(folder / "base" / "model")}
        grid = FULL | {name: {**adapt, **fields} for name, fields in LORA.items()}
        if asked.quick:
            fewer = {"training.steps": QUICK_STEPS, "checkpoint.every": QUICK_STEPS // 2}
            grid = {name: fewer | grid[name] for name in QUICK}
        print(f"{'':36}{'tensor bytes, MB':>26}{'process minus base, MB':>28}")
        print(f"{'':36}" + f"{'predicted':>10}{'came':>8}{'ratio':>8}" * 2 + f"{'speed':>8}")
        for number, (name, fields) in enumerate(grid.items()):
            say(name)
            row = _row(name, _in_process({**COMMON, **fields}, folder / str(number)))
            rows.append(row)
            figures = ""
            for kind in ("tensors", "process"):
                predicted, measured = row[kind]["predicted"] / 1e6, row[kind]["measured"] / 1e6
                figures += f"{predicted:10.1f}{measured:8.1f}{row[kind]['ratio']:8.3f}"
            print(f"{name:36}{figures}{row['speed']['ratio']:8.2f}", flush=True)
    large = [row for row in rows if row["tensors"]["measured"] >= LARGE_BYTES]
    result: dict[str, Any] = {
        "largest_error": {
            kind: max(abs(row[kind]["ratio"] - 1) for row in large)
            for kind in ("tensors", "process")
        },
        "rows": rows,
    }
    for kind, error in result["largest_error"].items():
        print(f"largest error of {kind}, from 200 MB of tensors on: {100 * error:.1f} %")
    if asked.output is None:
        write_result("prediction", result, {"steps": STEPS, "common": COMMON, "base": BASE})
    else:
        write_json(asked.output, result)


def _row(name: str, run: dict[str, Any]) -> dict[str, Any]:
    peak = run["peak_bytes"]

    def pair(predicted: float, measured: float) -> dict[str, float]:
        return {"predicted": predicted, "measured": measured, "ratio": predicted / measured}

    return {
        "recipe": name,
        "parameters": run["parameters"],
        "tensors": pair(peak["predicted"], peak["measured"]),
        "process": pair(peak["process_predicted"] - peak["base"], peak["process"] - peak["base"]),
        "base": peak["base"],
        "speed": pair(run["planned"]["tokens_per_second"], run["tokens_per_second"]),
    }


def _in_process(fields: dict[str, Any], out: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", json.dumps(fields), str(out)]
    environment = tuned(os.environ)  # as `modicum train` has it
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{fields} failed:\n{done.stderr}")
    run: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return run


def one(fields: dict[str, Any], out: str) -> None:
    """Plan and train one recipe; what came of it goes to standard output as a line of JSON."""
    from modicum.planner import plan
    from modicum.recipe import Recipe, assign
    from modicum.trainer import train

    values: dict[str, Any] = {}
    for field, value in fields.items():
        assign(values, field, value)
    planned = plan(Recipe(**values))
    run = train(planned, out)
    run["planned"] = {
        "tokens_per_second": planned.tokens_per_second,
    }
    print(json.dumps(run))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(json.loads(sys.argv[2]), sys.argv[3])
    else:
        main()
