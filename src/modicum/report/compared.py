"""The page of a comparison: who is better, at which cost, and by which settings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import JsonObject, disk_errors, read_json, read_text, write_text
from modicum.report.numbers import in_bytes, number, short
from modicum.report.page import page_of
from modicum.report.recipes import differing
from modicum.report.run import refuse_others
from modicum.report.svg_plots import Axis, PlottedLine, PlottedMark, plot
from modicum.trainer.folder import RunFolder

RESULT, PAGE, BEST = "compare.json", "compare.html", "best.yaml"
COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "peak": ("peak bytes", in_bytes),
    "state": ("bytes of optimizer state", in_bytes),
    "seconds": ("seconds of a run", lambda value: f"{value:.3g} s"),
}
_MOST_POINTS = 200  # of a training curve


def write_compared(folder: str | Path) -> Path:
    """Write `compare.html` of a comparison's folder, atomically, and return its path.

    Raises:
        InputError: there is no comparison, the disk is full, or what writes the page is not
            installed.
    """
    place = Path(folder)
    if not (place / RESULT).is_file():
        raise InputError("holds no finished comparison", file=place)
    target = place / PAGE
    refuse_others(target)
    with disk_errors(target):
        write_text(target, render_compared(place))
    return target


def render_compared(folder: Path) -> str:
    """The page, a function of the folder's files."""
    found = read_json(folder / RESULT)
    sides = [row["name"] for row in found["sides"]]
    judged = {side: _judged(found, side) for side in sides}
    best = folder / BEST
    return page_of(
        "compared.html.j2",
        {
            "name": folder.name,
            "found": found,
            "rows": [_row(found, side, judged[side]) for side in sides],
            "tests": {name: _winner_words(test) for name, test in found["tests"].items()},
            "verdict": _winner_words(found["judgement"]),
            "seeds": found["judgement"]["seeds"],
            "costs": [_against(kind, *drawn, sides, judged) for kind, drawn in COSTS.items()],
            "tuned": _tuned(found, sides),
            "curves": _curves(judged),
            "differences": _differences(found, sides),
            "budget": (found["identity"].get("given") or {}).get("budget"),
            "best": read_text(best) if best.is_file() else "",
        },
    )


def _judged(found: JsonObject, side: str) -> list[JsonObject]:
    rows = found["trials"]
    return [row for row in rows if row["side"] == side and row["part"] == "judge"]


def _row(found: JsonObject, side: str, judged: Sequence[JsonObject]) -> JsonObject:
    """A side's line in the table."""
    judgement = found["judgement"]
    standing = _named(judgement["standings"], side) or {}
    difference = _named(judgement["differences"], side) or {}
    result = next(row for row in found["sides"] if row["name"] == side)
    settings = {k: v for k, v in (result["frozen"] or {}).items() if k != "recipe"}
    given = found["identity"].get("given") or {}
    return {
        "side": side,
        "place": [row["name"] for row in found["sides"]].index(side) % 8,
        "refused": result["problem"] if result["frozen"] is None else "",
        "mean": standing.get("mean"),
        "deviation": standing.get("deviation"),
        "problem": result["problem"] or standing.get("problem"),
        "difference": difference.get("mean"),
        "interval": difference.get("interval"),
        "bootstrap": difference.get("bootstrap"),
        "verdict": "; ".join(filter(None, map(difference.get, ("verdict", "reason"))))
        or "the least mean",
        "unequal": given.get("unequal", {}).get(side, ""),
        "trained": _cost(judged, "trained"),
        "cost": {kind: _cost(judged, kind) for kind in COSTS},
        "tokens": _cost(judged, "tokens"),
        "settings": settings,
        "tried": result["tried"],
        "defaults": result["defaults"],
        "tuned": result["tuned"],
        "notes": result["notes"],
    }


def _named(rows: Sequence[JsonObject], side: str) -> JsonObject | None:
    return next((row for row in rows if row["side"] == side), None)


def _cost(judged: Sequence[JsonObject], kind: str) -> float | None:
    """The mean over runs; of bytes the most."""
    known = [_spent(row, kind) for row in judged]
    values = [value for value in known if value is not None]
    if not values:
        return None
    return fmean(values) if kind in ("seconds", "tokens") else max(values)


def _spent(row: JsonObject, kind: str) -> float | None:
    return number(row[kind] if kind in ("seconds", "tokens") else row["bytes"].get(kind))


def _winner_words(judgement: JsonObject) -> str:
    seeds = len(judgement["seeds"])
    if judgement["winner"]:
        return f"{judgement['winner']} is better than every other side, at 95 % over {seeds} seeds"
    if seeds < 2:
        return "one seed gives no interval, so nothing is shown"
    return f"no side is shown to be better than all others, at 95 % over {seeds} seeds"


def _against(
    kind: str, title: str, written: Any, sides: Sequence[str], judged: Mapping[str, Any]
) -> JsonObject:
    """Loss against a cost: a point for each side, and a line through those that nothing beats."""
    points = {}
    for side in sides:
        losses = [number(row["loss"]) for row in judged[side]]
        cost = _cost(judged[side], kind)
        if cost is not None and losses and None not in losses:
            points[side] = (cost, fmean(value for value in losses if value is not None))
    if len({cost for cost, _ in points.values()}) < 2:
        return {"title": title, "plot": "", "front": []}  # nothing to choose by
    front = pareto(points)
    lines = [PlottedLine("front", sorted(points[side] for side in front), 7)]
    lines += [
        PlottedLine(side, [points[side]], place, False, [f"{written(points[side][0])}, loss "
                    f"{points[side][1]:.4f}"])
        for place, side in enumerate(sides)
        if side in points
    ]  # fmt: skip
    drawn = plot(lines, Axis(title, written=written), Axis("loss"))
    return {"title": title, "plot": drawn, "front": front}


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The sides that no other is both cheaper and better than.

    >>> pareto({"a": (1, 3), "b": (2, 2), "c": (3, 2.5)})
    ['a', 'b']
    """
    return [
        side
        for side, (cost, loss) in points.items()
        if not any(
            (c <= cost and other <= loss) and (c, other) != (cost, loss)
            for c, other in points.values()
        )
    ]


def _tuned(found: JsonObject, sides: Sequence[str]) -> list[JsonObject]:
    """For each tuned field the losses over its values, a line for each side."""
    fields: dict[str, list[PlottedLine]] = {}
    for place, side in enumerate(sides):
        result = next(row for row in found["sides"] if row["name"] == side)
        for path, points in result["curves"].items():
            numeric = [p for p in points if number(p[0]) is not None]
            known = [(p[0], p[1]) for p in numeric if number(p[1]) is not None]
            crosses = [p[0] for p in numeric if number(p[1]) is None]
            line = PlottedLine(side, known, place, path.endswith("learning_rate"), crosses=crosses)
            fields.setdefault(path, []).append(line)
    drawn = []
    for path, lines in fields.items():
        values = [x for line in lines for x, _ in line.points]
        log = bool(values) and min(values) > 0 and max(values) > 8 * min(values)
        title = path.rpartition(".")[2].replace("_", " ")
        if picture := plot(lines, Axis(title, log), Axis("validation loss")):
            drawn.append({"title": title, "plot": picture})
    return drawn


def _curves(judged: Mapping[str, Sequence[JsonObject]]) -> JsonObject:
    """Mean training loss over the tokens, and where two sides' means cross for the last time."""
    means = {side: _mean_curve(rows) for side, rows in judged.items()}
    known = [(place, side, curve) for place, (side, curve) in enumerate(means.items()) if curve]
    lines = [PlottedLine(side, curve, place) for place, side, curve in known]
    crossed = crossings(means)
    marks = [
        PlottedMark((one["tokens"], one["loss"]),
                    f"{one['of']} falls below {one['below']} after {short(one['tokens'])} tokens")
        for one in crossed
    ]  # fmt: skip
    axes = Axis("tokens", written=short), Axis("training loss")
    return {"plot": plot(lines, *axes, dots=False, marks=marks), "crossings": crossed}


def _mean_curve(rows: Sequence[JsonObject]) -> list[tuple[float, float]]:
    """Tokens and the mean of the seeds' losses, each smoothed over a fiftieth of the run."""
    runs = [RunFolder(Path(row["folder"])).curve() for row in rows if row["folder"]]
    runs = [run for run in runs if run]
    if not runs:
        return []
    steps = min(map(len, runs))
    window, stride = max(1, steps // 50), max(1, steps // _MOST_POINTS)
    curve, tokens = [], 0.0
    for step in range(steps):
        tokens += fmean(run[step]["tokens"] for run in runs)
        if step % stride and step != steps - 1:
            continue
        near = [run[s]["loss"] for run in runs for s in range(max(0, step - window + 1), step + 1)]
        if None not in near:
            curve.append((tokens, fmean(near)))
    return curve


def crossings(curves: Mapping[str, Sequence[tuple[float, float]]]) -> list[JsonObject]:
    """Where the curve of one side falls below another's that was lower before.

    Of each pair the last time, over the tokens that both have; between its points a curve is a
    line, so sides may take unequal updates.

    >>> crossings({"a": [(1, 3.0), (2, 2.0)], "b": [(1, 2.5), (2, 2.2)]})
    [{'of': 'a', 'below': 'b', 'tokens': 2, 'loss': 2.0}]
    """
    found = []
    for one, other in combinations(curves, 2):
        if not curves[one] or not curves[other]:
            continue
        least = max(curves[side][0][0] for side in (one, other))
        most = min(curves[side][-1][0] for side in (one, other))
        places = {place for side in (one, other) for place, _ in curves[side]}
        pairs = [
            (place, _at(curves[one], place), _at(curves[other], place))
            for place in sorted(places)
            if least <= place <= most
        ]
        apart = [pair for pair in pairs if pair[1] != pair[2]]
        turns = [after for before, after in pairwise(apart)
                 if (before[1] < before[2]) != (after[1] < after[2])]  # fmt: skip
        if turns:
            place, a, b = turns[-1]
            of, below = (one, other) if a < b else (other, one)
            found.append({"of": of, "below": below, "tokens": place, "loss": min(a, b)})
    return found


def _at(curve: Sequence[tuple[float, float]], place: float) -> float:
    """The value of a curve at a place that it spans."""
    after = bisect_left(curve, place, key=lambda point: point[0])
    (right, value), (left, before) = curve[after], curve[max(0, after - 1)]
    if right in (left, place):
        return value
    return before + (value - before) * (place - left) / (right - left)


def _differences(found: JsonObject, sides: Sequence[str]) -> list[tuple[str, list[Any]]]:
    recipes = (found["identity"].get("given") or {}).get("recipes") or {}
    known = [side for side in sides if side in recipes]
    return [(name, list(values)) for name, values in differing([recipes[s] for s in known])]
