"""The page of a comparison that a protocol carried out: speed-ups in data, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import JsonObject, disk_errors, read_json, write_text
from modicum.report.compared import COSTS, pareto
from modicum.report.numbers import number, short
from modicum.report.page import page_of
from modicum.report.run import refuse_others
from modicum.report.svg_plots import Axis, PlottedLine, plot

RESULT, PAGE = "protocol.json", "protocol.html"
_METRICS = {"peak": "peak_bytes", "state": "state_bytes", "seconds": "seconds"}


def write_protocol(folder: str | Path) -> Path:
    """Write `protocol.html` of a comparison's folder, atomically, and return its path.

    Raises:
        InputError: there is no such comparison, the disk is full, or what writes the page is not
            installed.
    """
    place = Path(folder)
    if not (place / RESULT).is_file():
        raise InputError("holds no finished comparison by a protocol", file=place)
    target = place / PAGE
    refuse_others(target)
    with disk_errors(target):
        write_text(target, render_protocol(place))
    return target


def render_protocol(folder: Path) -> str:
    """The page, a function of the folder's files."""
    found = read_json(folder / RESULT)
    sides = list(dict.fromkeys(row["side"] for row in found["findings"]))
    most = max(row["tokens"] for row in found["findings"])
    ends = [row for row in found["findings"] if row["tokens"] == most]
    return page_of(
        "protocol.html.j2",
        {
            "name": folder.name,
            "found": found,
            "sides": sides,
            "rows": [_row(found, row, sides.index(row["side"]) % 8) for row in found["findings"]],
            "seeds": max(len(row["losses"]) for row in found["findings"]),
            "curve": _curve(found["findings"], sides),
            "most": most,
            "costs": [_against(kind, ends, sides) for kind in _METRICS],
            "crossings": [row for row in found["crossings"] if row["shares"]],
        },
    )


def _row(found: JsonObject, row: JsonObject, place: int) -> JsonObject:
    """A side's line at an amount of data."""
    losses = _finite(row["losses"])
    return {
        **row,
        "place": place,
        "mean": fmean(losses) if losses else None,
        "spread": stdev(losses) if len(losses) > 1 else None,
        "diverged": "diverged" in [*row["losses"], row["tuned"]],
        "settings": row["settings"] or {},
        "over": _speedup(found["speedups"], row),
        "over_default": _speedup(found["over_default"], row),
        "cost": {kind: row["metrics"].get(name) for kind, name in _METRICS.items()},
    }


def _speedup(rows: Sequence[JsonObject], of: JsonObject) -> JsonObject | None:
    """The speed-up of a side at its amount of data, where there is one."""
    same = [row for row in rows if row["side"] == of["side"] and row["ratio"] == of["ratio"]
            and row["parameters"] == of["parameters"]]  # fmt: skip
    return same[0]["speedup"] if same else None


def _finite(losses: Sequence[Any]) -> list[float]:
    """All losses, if all are numbers; else none: no mean is claimed of what is left."""
    known = [number(loss) for loss in losses]
    return [] if None in known else [loss for loss in known if loss is not None]


def _curve(findings: Sequence[JsonObject], sides: Sequence[str]) -> str:
    """Mean losses over the data, a line for each side."""
    lines = []
    for place, side in enumerate(sides):
        rows = [row for row in findings if row["side"] == side and _finite(row["losses"])]
        points = sorted((float(row["tokens"]), fmean(_finite(row["losses"]))) for row in rows)
        lines.append(PlottedLine(side, points, place))
    return plot(lines, Axis("tokens", log=True, written=short), Axis("loss of fresh seeds"))


def _against(kind: str, rows: Sequence[JsonObject], sides: Sequence[str]) -> JsonObject:
    """Loss against a cost at the most data: a point for each side, and the front."""
    title, written = COSTS[kind]
    points = {}
    for row in rows:
        cost, losses = number(row["metrics"].get(_METRICS[kind])), _finite(row["losses"])
        if cost is not None and losses and math.isfinite(cost):
            points[row["side"]] = (cost, fmean(losses))
    if len({cost for cost, _ in points.values()}) < 2:
        return {"plot": "", "front": []}  # nothing to choose by
    front = pareto(points)
    lines = [PlottedLine("front", sorted(points[side] for side in front), 7)]
    lines += [PlottedLine(side, [points[side]], place, False)
              for place, side in enumerate(sides) if side in points]  # fmt: skip
    return {"plot": plot(lines, Axis(title, written=written), Axis("loss")), "front": front}
