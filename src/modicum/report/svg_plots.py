"""Plots as SVG, drawn here: points and lines on two axes, each with its value as a tooltip.

A plot is text of the page, so it opens offline, scales to a phone, and follows light and dark by
the page's colours.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 40
_TICKS = 5


@dataclass(frozen=True)
class PlottedLine:
    """A series: points (x, y), in the colour of a place; joined or not.

    Args:
        labels: a tooltip for each point; empty: its numbers.
        crosses: places of runs without a value, such as one that diverged: drawn at the top.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    joined: bool = True
    labels: Sequence[str] = ()
    crosses: Sequence[float] = ()


@dataclass(frozen=True)
class PlottedMark:
    """A ring around a place of a plot, such as one where two lines cross, and what is there."""

    place: tuple[float, float]
    label: str


@dataclass(frozen=True)
class Axis:
    """An axis: what it shows, whether it is logarithmic, how its numbers are written."""

    title: str
    log: bool = False
    written: Callable[[float], str] = lambda value: f"{value:.4g}"

    def scaled(self, value: float) -> float:
        """Where a value lies, in equal steps."""
        return math.log10(value) if self.log else value


def plot(
    lines: Sequence[PlottedLine],
    x: Axis,
    y: Axis,
    *,
    dots: bool = True,
    marks: Sequence[PlottedMark] = (),
) -> str:
    """The SVG of a plot; empty where there is nothing to draw.

    Args:
        marks: at places within what the lines span.

    >>> drawn = plot([PlottedLine("a", [(1, 2), (2, 1)], 0)], Axis("rate"), Axis("loss"))
    >>> drawn.count("<circle"), drawn.count("<polyline")
    (2, 1)
    """
    lines = [_drawable(line, x, y) for line in lines]
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    xs = [a for a, _ in points] + [a for line in lines for a in line.crosses]
    across = _Scale.of(map(x.scaled, xs), _LEFT, WIDTH - _RIGHT)
    up = _Scale.of((y.scaled(b) for _, b in points), HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(f"{y.title} against {x.title}")}">'
    ]
    parts += _axes(across, up, x, y)
    for line in lines:
        parts += _line(line, across, up, x, y, dots=dots)
    for mark in marks:
        a, b = across(x.scaled(mark.place[0])), up(y.scaled(mark.place[1]))
        parts.append(f'<circle class="mark" cx="{a}" cy="{b}" r="7">'
                     f"<title>{html.escape(mark.label)}</title></circle>")  # fmt: skip
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    @classmethod
    def of(cls, values: Iterable[float], start: float, end: float) -> _Scale:
        known = list(values)
        low, high = min(known), max(known)
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(low - room, high + room, start, end)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, *, log: bool = False) -> list[float]:
        """About five round values; of logarithms those of 1, 2 and 5 times a power of ten."""
        if log:
            return self._powers()
        step = _round_step((self.high - self.low) / _TICKS)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step) + 1)]

    def _powers(self) -> list[float]:
        first, last = math.floor(self.low), math.ceil(self.high)
        for factors in ((1,), (1, 3), (1, 2, 5)):
            found = [
                place + math.log10(factor)
                for place in range(first, last + 1)
                for factor in factors
                if self.low <= place + math.log10(factor) <= self.high
            ]
            if len(found) >= _TICKS - 2:
                break
        return found


def _round_step(step: float) -> float:
    size = 10 ** math.floor(math.log10(step))
    return float(size * next(n for n in (1, 2, 2.5, 5, 10) if n * size >= step * 0.999))


def _drawable(line: PlottedLine, x: Axis, y: Axis) -> PlottedLine:
    """The line without what its axes cannot show."""
    kept = [
        (point, label)
        for point, label in zip(line.points, line.labels or [""] * len(line.points), strict=True)
        if all(map(math.isfinite, point))
        and not (x.log and point[0] <= 0)
        and not (y.log and point[1] <= 0)
    ]
    crosses = [a for a in line.crosses if math.isfinite(a) and not (x.log and a <= 0)]
    labels = [label for _, label in kept]
    return PlottedLine(line.name, [p for p, _ in kept], line.colour, line.joined, labels, crosses)


def _axes(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    bottom, parts = HEIGHT - _BOTTOM, []
    for tick in up.ticks(log=y.log):
        place, value = up(tick), 10**tick if y.log else tick
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place}" '
                     f'y2="{place}"/>')  # fmt: skip
        parts.append(f'<text x="{_LEFT - 8}" y="{place + 4}" text-anchor="end">'
                     f"{html.escape(y.written(value))}</text>")  # fmt: skip
    for tick in across.ticks(log=x.log):
        place, value = across(tick), 10**tick if x.log else tick
        parts.append(f'<text x="{place}" y="{bottom + 17}" text-anchor="middle">'
                     f"{html.escape(x.written(value))}</text>")  # fmt: skip
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="title" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">'
                 f"{html.escape(x.title)}</text>")  # fmt: skip
    return parts


def _line(
    line: PlottedLine, across: _Scale, up: _Scale, x: Axis, y: Axis, *, dots: bool
) -> list[str]:
    style, name = f"--c: var(--run-{line.colour % 8})", html.escape(line.name)
    places = [(across(x.scaled(a)), up(y.scaled(b))) for a, b in line.points]
    parts = [f'<g style="{style}">']
    if line.joined and len(places) > 1:
        parts.append(f'<polyline points="{" ".join(f"{a},{b}" for a, b in places)}"/>')
    if dots:
        for (a, b), point, label in zip(places, line.points, line.labels, strict=True):
            numbers = f"{x.written(point[0])}, {y.written(point[1])}"
            told = f"{name}: {html.escape(label or numbers)}"
            parts.append(f'<circle cx="{a}" cy="{b}" r="4"><title>{told}</title></circle>')
    for cross in line.crosses:
        told = f"{name}: {html.escape(x.written(cross))}, no loss"
        parts.append(f'<text class="cross" x="{across(x.scaled(cross))}" y="{_TOP + 10}" '
                     f'text-anchor="middle">×<title>{told}</title></text>')  # fmt: skip
    return [*parts, "</g>"]
