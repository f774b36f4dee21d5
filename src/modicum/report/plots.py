"""Kinds and phases of a run's memory: their colours, names and order, and the bars of a picture."""

from __future__ import annotations

import math
from typing import Any

from modicum.report.numbers import in_bytes

KINDS = (
    "weight", "gradient", "optimizer", "activation", "workspace", "buffer", "host", "other",
)  # fmt: skip


def colour(kind: str) -> str:
    """The role that a kind of memory is drawn in."""
    return kind if kind in KINDS else "other"


def phase_title(phase: str) -> str:
    """A phase as the page names it."""
    return "optimizer step" if phase == "step" else phase


def rank(kind: str) -> int:
    """The place of a kind of memory in stacks, legends and tables."""
    return KINDS.index(colour(kind))


def bars(
    phases: dict[str, dict[str, float]], budget: float | None, measured: float | None
) -> dict[str, Any] | None:
    """A bar for each phase, stacked by kind, lines for budget and peak, and ticks.

    Lengths and places are in per cent of the picture's width. None where there is no phase.
    """
    levels = [("measured", measured), ("budget", budget)]
    longest = max(
        [*(sum(stack.values()) for stack in phases.values()), *(v for _, v in levels if v), 0.0]
    )
    if not phases or not 0 < longest < math.inf:
        return None
    end = 1.03 * longest

    def share(value: float) -> float:
        return round(max(0.0, min(100.0, 100 * value / end)), 3)

    return {
        "rows": [
            {
                "phase": phase_title(phase),
                "total": sum(stack.values()),
                "parts": [
                    {"kind": kind, "bytes": stack[kind], "width": share(stack[kind])}
                    for kind in sorted(stack, key=rank)
                ],
            }
            for phase, stack in phases.items()
        ],
        "lines": [
            {"role": role, "place": share(value)} for role, value in levels if value is not None
        ],
        "ticks": [{"text": in_bytes(tick), "place": share(tick)} for tick in _ticks(end)],
    }


def _ticks(end: float) -> list[float]:
    """Zero and round numbers up to `end`, four to eight of them."""
    size = 10.0 ** math.floor(math.log10(end))
    step = next(size * part for part in (0.2, 0.5, 1, 2) if end / (size * part) <= 6)
    return [step * place for place in range(int(end / step) + 1)]
