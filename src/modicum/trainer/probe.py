"""Measure this machine, as `python -m modicum.trainer.probe cpu`: small runs, and what they held.

A tiny run loads all that runs load; what the process holds after it, beyond what it held when the
run was planned, is no tensor's. Larger ones show what the allocator keeps next to tensors, where
weights are trained or frozen, in fp32 and in bf16. On an accelerator, where forecasts are of
tensors alone, one run shows how fast it is. The figures are a line of JSON on standard
output, for `modicum.core.machine.record`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from modicum.core.machine.record import assume, placeholder
from modicum.core.memory import forget_peak, peak_resident_bytes, release, resident_bytes
from modicum.planner import plan
from modicum.planner.plan import Plan
from modicum.recipe import Recipe
from modicum.trainer.folder import METRICS, RunFolder
from modicum.trainer.loop import train

# A tokenizer leaves something behind that grows with its text, slowly: a usual amount.
_TEXT: dict[str, Any] = {"limit": "1MB", "sequence_length": 64}
_DATA: dict[str, Any] = {"include": ["json/**"], "sequence_length": 256}
_TINY = {"layers": 2, "width": 64, "heads": 2, "vocabulary_size": 512}
_LARGE = {"layers": 5, "width": 256, "heads": 4, "vocabulary_size": 2048}
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
        made, _ = _trained(folder / "fp32", _recipe(_LARGE, 32, device=device))
        efficiency = _efficiency(made, folder / "fp32")
        return {"loaded_bytes": 0, "kept": [0.0, 0.0], "efficiency": efficiency}
    tiny, _ = _trained(folder / "tiny", _recipe(_TINY, rows=4))
    release()
    base = resident_bytes()
    kept, efficiency = [], 0.0
    base_model = {"path": str(folder / "fp32" / "model")}
    adapter = {"method": "lora", "rank": 8}
    large = {
        "fp32": _recipe(_LARGE, rows=10),
        "bf16": _recipe(_LARGE, rows=14, precision="bf16"),
        "adapted": _recipe(base_model, rows=14).changed(adapter=adapter),
    }
    for name, recipe in large.items():
        release()
        begins = min(base, resident_bytes())
        forget_peak()
        made, run = _trained(folder / name, recipe)
        tensors = run["peak_bytes"]["measured"]
        kept.append(max(0.0, (peak_resident_bytes() - begins) / tensors - 1))
        if name == "fp32":
            efficiency = _efficiency(made, folder / name)
        print(f"{name}: {tensors} bytes of tensors, kept {kept[-1]:.3f}", file=sys.stderr)
    return {
        "loaded_bytes": max(0, base - tiny.process_base),
        "kept": [min(kept), max(kept)],
        "efficiency": efficiency,
    }


def _recipe(
    model: dict[str, Any], rows: int, precision: str = "fp32", device: str = "cpu"
) -> Recipe:
    return Recipe(
        model=model,
        data=_TEXT if model is _TINY else _DATA,
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


def _trained(out: Path, recipe: Recipe) -> tuple[Plan, dict[str, Any]]:
    made = plan(recipe)
    return made, train(made, out)


def _efficiency(made: Plan, folder: Path) -> float:
    """Of the rate of a large product, the part that the fastest step reached.

    The machine may have other work to do while it is measured, which must not count.
    """
    seconds = min(float(row["seconds"]) for row in RunFolder(folder).rows(METRICS))
    return made.prediction.flops / seconds / made.machine.flops


if __name__ == "__main__":
    main()
