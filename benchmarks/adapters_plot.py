"""Draw docs/assets/adapters.svg of the result of `adapters.py`: steps, saved bytes, the curve."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from common import HERE, RESULTS, say

mpl.use("svg")
from matplotlib import pyplot as plt

PICTURE = HERE.parent / "docs" / "assets" / "adapters.svg"
CASE = "bf16, dropout 0.05"
OURS, PEFT = "tab:blue", "tab:orange"


def draw_steps(axes: Any, steps: dict[str, Any]) -> None:
    """Medians and quartiles over the frozen step, and what the work alone would be."""
    for place, row in enumerate(steps.values()):
        over = row["over_frozen"]
        low, high = (over[key] for key in ("lower_quartile", "upper_quartile"))
        axes.plot([low, high], [place, place], color=OURS)
        axes.plot(over["median"], place, "o", color=OURS)
        axes.plot(row["work_over_frozen"], place, "|", color="black", markersize=12)
        if "over_peft" in row:
            axes.plot(over["median"] / row["over_peft"]["median"], place, "s", color=PEFT)
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.set_xlabel("step over the frozen model's (bar: its work)")


def draw_saved(axes: Any, saved: dict[str, Any]) -> None:
    """Bytes over what the equations need, in the case that asks most."""
    drops = {name: cases[CASE] for name, cases in saved.items() if CASE in cases}
    for place, row in enumerate(drops.values()):
        axes.plot(row["over_needed"], place, "o", color=OURS)
        if "peft" in row:
            axes.plot(row["peft"] / row["needed"], place, "s", color=PEFT)
    axes.set_yticks(range(len(drops)), list(drops))
    axes.invert_yaxis()
    axes.set_xlabel(f"saved bytes over what is needed ({CASE})")


def draw_curve(axes: Any, curve: list[dict[str, Any]]) -> None:
    """LoRA's total memory over LoRA-FA's, and the bound, by width."""
    for place, width in enumerate(sorted({row["width"] for row in curve})):
        rows = [row for row in curve if row["width"] == width]
        positions, color = [row["positions"] for row in rows], f"C{place}"
        axes.plot(positions, [row["ratio"] for row in rows], color=color, label=f"width {width}")
        axes.plot(positions, [row["bound"] for row in rows], ":", color=color)
        there = [row for row in rows if "ratio_measured" in row]
        found = [row["ratio_measured"] for row in there]
        axes.plot([row["positions"] for row in there], found, "x", color=color)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("positions (dotted: the bound; x: measured)")
    axes.set_ylabel("LoRA's total memory over LoRA-FA's")
    axes.legend()


def main() -> None:
    """Draw the parts that the result has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, default=RESULTS / "adapters.json")
    parser.add_argument("--to", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    kinds: dict[str, Callable[[Any, Any], None]] = {
        "steps": draw_steps,
        "saved": draw_saved,
        "curve": draw_curve,
    }
    there = {part: draw for part, draw in kinds.items() if part in result}
    figure, axes = plt.subplots(1, len(there), figsize=(6 * len(there), 5), squeeze=False)
    for each, (part, draw) in zip(axes[0], there.items(), strict=True):
        draw(each, result[part])
    for name, color in (("modicum", OURS), ("peft", PEFT)):
        axes[0][0].plot([], [], "o", color=color, label=name)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(arguments.to, metadata={"Date": None})
    say(f"wrote {arguments.to}")


if __name__ == "__main__":
    main()
