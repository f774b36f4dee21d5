"""The picture of what adapters cost, from the committed result of `benchmarks/adapters.py`.

Steps over the frozen model's, saved bytes over what the equations need, and LoRA-FA's curve: LoRA's
total memory over its own, next to its bound.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

CASE = "bf16, dropout 0.05"  # the case in which most is saved
OURS, PEFT = "tab:blue", "tab:orange"


def draw_steps(axes: Any, steps: Mapping[str, Any]) -> None:
    """Medians and quartiles over the frozen step, and what the work alone would be."""
    for place, row in enumerate(steps.values()):
        over = row["over_frozen"]
        low, high = (over[key] for key in ("lower_quartile", "upper_quartile"))
        axes.plot([low, high], [place, place], color=OURS)
        axes.plot(over["median"], place, "o", color=OURS)
        axes.plot(row["work_over_frozen"], place, "|", color="black", markersize=12)
        if "over_peft" in row:
            axes.plot(over["median"] / row["over_peft"]["median"], place, "s", color=PEFT)
    for name, color, mark in (("modicum", OURS, "o"), ("peft", PEFT, "s")):
        axes.plot([], [], mark, color=color, label=name)
    axes.legend()
    _named(axes, steps)
    axes.set_xlabel("step over the frozen model's (bar: its work)")


def draw_saved(axes: Any, saved: Mapping[str, Any]) -> None:
    """Bytes over what the equations need."""
    rows = {name: cases[CASE] for name, cases in saved.items() if CASE in cases}
    for place, row in enumerate(rows.values()):
        axes.plot(row["over_needed"], place, "o", color=OURS)
        if "peft" in row:
            axes.plot(row["peft"] / row["needed"], place, "s", color=PEFT)
    _named(axes, rows)
    axes.set_xlabel(f"saved bytes over what is needed ({CASE})")


def draw_curve(axes: Any, curve: Sequence[Mapping[str, Any]]) -> None:
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


def picture(found: Mapping[str, Any]) -> str:
    """The three of them, as SVG.

    Args:
        found: the result of `benchmarks/adapters.py`.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplot_mosaic(
        [["steps", "saved"], ["curve", "curve"]], figsize=(11, 12), height_ratios=(3, 2)
    )
    draw_steps(axes["steps"], found["steps"])
    draw_saved(axes["saved"], found["saved"])
    draw_curve(axes["curve"], found["curve"])
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    plt.close(figure)
    return drawn.getvalue()


def _named(axes: Any, names: Mapping[str, Any]) -> None:
    """A row for each name, the first on top."""
    axes.set_yticks(range(len(names)), list(names))
    axes.invert_yaxis()
