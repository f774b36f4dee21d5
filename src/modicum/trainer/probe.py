"""Measure this machine, as `python -m modicum.trainer.probe cpu`: small runs, and what they held.

Each run has a process of its own, which does all that a run does. Of two sizes, what grows with
tensors is distinguished from what does not: modules and kernels that are loaded when they are first
used, and what a tokenizer leaves behind. The others show what the allocator keeps next to tensors
in bf16, and where weights are frozen. On an accelerator, where forecasts are of tensors alone, one
run shows how fast it is. The figures are a line of JSON on standard output, for
`modicum.core.machine.record`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from modicum.core.files import write_json
from modicum.core.machine.memory import peak_resident_bytes, resident_bytes
from modicum.core.machine.record import assume, placeholder
from modicum.core.torch_private import load_compiler
from modicum.planner import plan
from modicum.planner.plan import Plan
from modicum.recipe import Recipe
from modicum.trainer.folder import METRICS, RunFolder
from modicum.trainer.loop import train

_DATA: dict[str, Any] = {"limit": "1MB", "sequence_length": 256}
_MODEL = {"layers": 5, "width": 256, "heads": 4, "vocabulary_size": 2048}
_STEPS = 3


def main() -> None:
    """Run all, and print the figures."""
    device = sys.argv[1]
    assume(placeholder(), device)
    with tempfile.TemporaryDirectory(prefix="modicum-probe-") as folder:
        print(json.dumps(_figures(Path(folder), device)))


def _figures(folder: Path, device: str) -> dict[str, Any]:
    """See `MachineRecord`."""
    if device != "cpu":
        full, half = (
            _run(folder / name, _recipe(_MODEL, 32, precision=name, device=device))
            for name in ("fp32", "bf16")
        )
        return {
            "loaded_bytes": 0,
            "compiler_bytes": 0,
            "kept": [0.0, 0.0],
            "efficiency": full["efficiency"],
            "half_efficiency": half["efficiency"],
        }
    compiler = _alone(folder / "compiler", _load)["compiler"]
    small = _alone(folder / "small", partial(_run, recipe=_recipe(_MODEL, rows=2)))
    large = _alone(folder / "fp32", partial(_run, recipe=_recipe(_MODEL, rows=10)))
    each = (_beyond(large) - _beyond(small)) / (large["small"] - small["small"])
    kept = [max(0.0, each)]
    loaded = max(0.0, _beyond(large) - kept[0] * large["small"])
    base_model = {"path": str(folder / "fp32" / "model")}
    adapted = _recipe(base_model, rows=14).changed(adapter={"method": "lora", "rank": 8})
    efficiency = {}
    others = {"bf16": _recipe(_MODEL, rows=14, precision="bf16"), "adapted": adapted}
    for name, recipe in others.items():
        run = _alone(folder / name, partial(_run, recipe=recipe))
        kept.append(max(0.0, (_beyond(run) - loaded) / run["small"]))
        efficiency[name] = run["efficiency"]
    return {
        "loaded_bytes": round(loaded),
        "compiler_bytes": min(compiler, round(loaded)),
        "kept": [min(kept), max(kept)],
        "efficiency": large["efficiency"],
        "half_efficiency": efficiency["bf16"],
    }


def _beyond(run: dict[str, Any]) -> float:
    """What a run's process grew by beyond its tensors."""
    beyond: float = run["grown"] - run["tensors"]
    return beyond


def _load(out: Path) -> dict[str, Any]:
    """What the process grows by when it loads torch's compiler."""
    before = resident_bytes()
    load_compiler()
    return {"compiler": resident_bytes() - before}


def _alone(out: Path, work: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Work in a process of its own, forked before torch has threads: a start costs no import.

    Raises:
        ChildProcessError: it failed, and has said why.
    """
    if (child := os.fork()) == 0:
        code = 1
        try:
            write_json(out.with_suffix(".json"), work(out))
            code = 0
        finally:
            if code:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
    if status := os.waitpid(child, 0)[1]:
        raise ChildProcessError(f"the run {out.name} ended with status {status}")
    figures: dict[str, Any] = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    print(f"{out.name}: {figures}", file=sys.stderr)
    return figures


def _run(out: Path, recipe: Recipe) -> dict[str, Any]:
    """What the process would grow by if nothing were kept, the bytes next to which something is
    kept, what it did grow by since it was planned, and its speed."""
    made = plan(recipe)
    train(made, out)
    return {
        "tensors": made.prediction.process_bytes(0, 0.0, staged=False),
        "small": max(1, made.prediction.small_bytes),
        "grown": peak_resident_bytes() - made.process_base,
        "efficiency": _efficiency(made, out),
    }


def _recipe(
    model: dict[str, Any], rows: int, precision: str = "fp32", device: str = "cpu"
) -> Recipe:
    return Recipe(
        model=model,
        data=_DATA,
        training={
            "steps": _STEPS,
            "batch_size": rows,
            "micro_batch_size": rows,
            "recompute": "none",
            "compile": "none",
            "precision": precision,
            "device": device,
        },
        samples={"count": 1, "tokens": 4},
        evaluation={"rows": 4},
        checkpoint={"asynchronous": False},
    )


def _efficiency(made: Plan, folder: Path) -> float:
    """Of the rate of a large product, the part that the fastest step reached.

    The machine may have other work to do while it is measured, which must not count.
    """
    seconds = min(float(row["seconds"]) for row in RunFolder(folder).rows(METRICS))
    return made.prediction.flops / seconds / made.machine.flops


if __name__ == "__main__":
    main()
