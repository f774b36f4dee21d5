"""The report's plots: inline SVG whose colours are the page's CSS variables.

matplotlib draws with one placeholder colour for each role; afterwards a placeholder becomes
`var(--role)`, so that one figure is right on a light page, on a dark one, and on paper.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from modicum.core.files import JsonObject
from modicum.report.numbers import in_bytes, number, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, HALF = (1000, 330), (480, 210)  # CSS pixels, as a wide window shows them
POINTS = 1000  # a line keeps about so many
ROLES = (
    "ink", "grid", "train", "train-raw", "validation", "budget", "measured", "weight", "gradient",
    "optimizer", "activation", "workspace", "buffer", "host", "other",
)  # fmt: skip
KINDS = ROLES[ROLES.index("weight") :]
_COLOUR = {role: f"#fe{index:02x}ef" for index, role in enumerate(ROLES)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "modicum",
    "font.family": "DejaVu Sans",  # only measured with: the page's own font is shown
    "font.size": 11.5,
    "text.color": _COLOUR["ink"],
    "axes.labelcolor": _COLOUR["ink"],
    "axes.edgecolor": _COLOUR["grid"],
    "axes.linewidth": 1.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.facecolor": "none",
    "grid.color": _COLOUR["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": _COLOUR["ink"],
    "ytick.color": _COLOUR["ink"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}

Points = tuple[list[float], list[float]]


def series(rows: Sequence[JsonObject], name: str) -> Points:
    """Steps and the finite values of `name` at them."""
    points = [
        (step, value)
        for row in rows
        if (step := number(row.get("step"))) is not None
        and (value := number(row.get(name))) is not None
    ]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float], half_life: float) -> list[float]:
    """The exponential average, free of the start's bias; `half_life` in values."""
    decay, total, weight, result = 0.5 ** (1 / half_life), 0.0, 0.0, []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        result.append(total / weight)
    return result


def thin(points: Points, count: int = POINTS) -> Points:
    """At most about `count` of the points: of each stretch its least and its greatest value."""
    steps, values = points
    size = math.ceil(2 * len(values) / count)
    if size <= 2:
        return points
    kept: list[int] = []
    for start in range(0, len(values), size):
        stretch = range(start, min(start + size, len(values)))
        ends = {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
        kept += sorted(ends)
    return [steps[index] for index in kept], [values[index] for index in kept]


@contextmanager
def _figure(size: tuple[int, int]) -> Iterator[tuple[Figure, Axes]]:
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no global state, no window
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.04)
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout=layout)
        yield figure, figure.add_subplot()


def _svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an element to stand in a page: our ids, our colours, no foreign address."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    box = re.search(r'viewBox="([^"]*)"', text)
    body = text[text.index(">") + 1 :]
    # Ids are numbered through: shorter, and the same whatever else the process has drawn.
    order: dict[str, str] = {}
    for found in re.findall(r'\bid="([^"]+)"', body):
        order.setdefault(found, f"{name}-{len(order)}")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(
        r'\s*\bid="([^"]+)"', lambda m: f' id="{order[m[1]]}"' if m[1] in used else "", body
    )
    body = re.sub(
        r'(xlink:href="#|url\(#)([^")]+)',
        lambda m: m[1].removeprefix("xlink:") + order.get(m[2], m[2]),
        body,
    )
    for role, colour in _COLOUR.items():
        body = body.replace(colour, f"var(--{role})")
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    view = box[1] if box else "0 0 1000 330"
    style = "stroke-linejoin: round; stroke-linecap: butt"
    return f'<svg viewBox="{view}" role="img" aria-label="{label}" style="{style}">{body}'


def _ticks(axis: Any, write: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))


def _steps_axis(axes: Axes, last: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, max(last, 1) * 1.005)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    _ticks(axes.xaxis, lambda value: f"{value:,.0f}")
    axes.grid(axis="x", visible=False)


def losses(metrics: Sequence[JsonObject], evaluations: Sequence[JsonObject]) -> str | None:
    """Training loss raw and smoothed, validation loss, over steps and over tokens."""
    kept = [row for row in metrics if not row.get("skipped")]
    raw, checked = series(kept, "loss"), series(evaluations, "loss")
    if not raw[0] and not checked[0]:
        return None
    with _figure(WIDE) as (figure, axes):
        if raw[0]:
            averaged = smooth(raw[1], max(1.0, len(raw[1]) / 60))
            axes.plot(*thin(raw), color=_COLOUR["train-raw"], linewidth=0.8)
            axes.plot(*thin((raw[0], averaged)), color=_COLOUR["train"])
        if checked[0]:
            axes.plot(
                *thin(checked), color=_COLOUR["validation"], marker="o", markersize=4.5,
                linewidth=1.4,
            )  # fmt: skip
        _steps_axis(axes, max([*raw[0][-1:], *checked[0][-1:]]))
        axes.set_xlabel("step")
        axes.set_ylabel("nats per token")
        _tokens_axis(axes, metrics)
        return _svg(figure, "losses", "Loss over steps")


def _tokens_axis(axes: Axes, metrics: Sequence[JsonObject]) -> None:
    """Above the plot, the tokens trained by the time of each tick below."""
    steps, tokens = series(metrics, "tokens")
    places = [place for place in axes.get_xticks() if steps and steps[0] <= place <= steps[-1]]
    if not places:
        return
    total, labels, index = 0.0, [], 0
    for place in places:
        while index < len(steps) and steps[index] <= place:
            total += tokens[index]
            index += 1
        labels.append(short(total))
    above = axes.secondary_xaxis("top")
    above.set_xticks(places, labels=labels)
    above.set_xlabel("tokens", labelpad=7)
    above.spines["top"].set_visible(False)


def over_steps(
    metrics: Sequence[JsonObject],
    name: str,
    *,
    label: str,
    write: Callable[[float], str],
    lines: dict[str, float | None] | None = None,
    average: bool = False,
) -> str | None:
    """One column of the metrics over steps; `lines` are levels, by the role of their colour."""
    points = series(metrics, name)
    if not points[0]:
        return None
    with _figure(HALF) as (figure, axes):
        colour = _COLOUR["train-raw" if average else "train"]
        axes.plot(*thin(points), color=colour, linewidth=0.9 if average else 1.6)
        if average:
            averaged = smooth(points[1], max(1.0, len(points[1]) / 60))
            axes.plot(*thin((points[0], averaged)), color=_COLOUR["train"])
        for role, level in (lines or {}).items():
            if level is not None:
                axes.axhline(level, color=_COLOUR[role], linestyle=(0, (5, 3)), linewidth=1.5)
        if min(points[1]) >= 0:
            axes.set_ylim(bottom=0)
            axes.margins(y=0.1)
        _steps_axis(axes, points[0][-1])
        axes.locator_params(axis="y", nbins=5)
        _ticks(axes.yaxis, write)
        return _svg(figure, name.replace("_", "-"), label)


def memory(
    phases: dict[str, dict[str, float]], budget: float | None, measured: float | None
) -> str | None:
    """A bar for each phase, stacked by kind; lines for the budget and for the measured peak."""
    if not phases:
        return None
    with _figure((WIDE[0], 80 + 42 * len(phases))) as (figure, axes):
        for place, stack in enumerate(phases.values()):
            left = 0.0
            for kind in sorted(stack, key=rank):
                axes.barh(place, stack[kind], left=left, height=0.62, color=_COLOUR[colour(kind)])
                left += stack[kind]
        for role, level in (("budget", budget), ("measured", measured)):
            if level is not None:
                axes.axvline(level, color=_COLOUR[role], linestyle=(0, (5, 3)), linewidth=1.8)
        axes.set_yticks(range(len(phases)), labels=[phase_title(phase) for phase in phases])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(left=0)
        axes.margins(x=0.03)
        _ticks(axes.xaxis, in_bytes)
        return _svg(figure, "memory", "Predicted memory by phase and kind")


def colour(kind: str) -> str:
    """The role that a kind of memory is drawn in."""
    return kind if kind in KINDS else "other"


def phase_title(phase: str) -> str:
    """A phase as the page names it."""
    return "optimizer step" if phase == "step" else phase


def rank(kind: str) -> int:
    """The place of a kind of memory in stacks, legends and tables."""
    return KINDS.index(colour(kind))
