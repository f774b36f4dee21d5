"""The page of linear forms that are trained: what `benchmarks/forms.py` has measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "forms.json"
WIDTHS = ("256", "512", "1024", "2048")


def page() -> str:
    """Products, steps, saved bytes and conversions of each form, next to dense layers."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    settings, machine = found["settings"], found["machine"]
    lines = [
        "# Linear forms",
        "",
        "Layers that are trained in factors or blocks take fewer operations than dense ones, and "
        "less time only from some width on. Measured on one thread of a machine without an "
        f"accelerator ({machine['processor']}), in fp32, as medians over {settings['rounds']} "
        "rounds in which all take turns. SST has the factors of a full SVD, and so has Maestro "
        "until it is pruned, so neither saves time here.",
        "",
        f"**Products**: how many times as fast as a dense layer a forward pass of "
        f"{settings['rows']} rows is, by the width of a square layer; and from which width of "
        "those measured (64, 128 and so on) it is never slower.",
        "",
        f"| form | {' | '.join(WIDTHS)} | faster from |",
        f"| --- | {' | '.join('---' for _ in WIDTHS)} | --- |",
        *_products(found["products"]),
        "",
        f"**Steps**: forward, backward and AdamW of one decoder block of width "
        f"{settings['width']} whose seven projections have the form, over the same block with "
        "dense ones, next to the ratio of their matrix products. What is no matrix product "
        "(attention, norms, activations) stays. **Saved**: bytes that a layer keeps for its "
        "backward pass, over what its equations read, at most. **Conversion**: memory in addition "
        "to a decoder of so many numbers, over that of its largest layer alone.",
        "",
        "| form | step | its products | saved | conversion | of |",
        "| --- | --- | --- | --- | --- | --- |",
        *_costs(found),
        "",
        "`python benchmarks/forms.py` measures this on your machine; how good the trained models "
        "are, the proofs say: `modicum prove monarch`.",
    ]
    return "\n".join(lines)


def _products(found: dict[str, Any]) -> Iterator[str]:
    for form, row in found.items():
        faster = [f"{row['widths'][width]['faster']['median']:.2f}" for width in WIDTHS]
        start = row["break_even"]
        yield f"| {form} | {' | '.join(faster)} | {'none' if start is None else start} |"


def _costs(found: dict[str, Any]) -> Iterator[str]:
    saved: dict[str, float] = {}
    for bar in found["bars"]:
        form, _, rest = bar["what"].partition(": ")
        if rest.startswith("saved over needed"):
            saved[form] = max(saved.get(form, 0.0), bar["figure"])
    for form, step in found["steps"].items():
        made = found["conversion"][form]
        numbers = f"{made['parameters'] / 1e6:.0f} M"
        yield (
            f"| {form} | {step['over_dense']['median']:.2f} | {step['work_over_dense']:.2f} | "
            f"{saved[form]:.3f} | {made['over_one_layer']:.2f} | {numbers} |"
        )
