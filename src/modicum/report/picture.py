"""A picture of a step's memory, as a file of its own: bars by phase, stacked by kind."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.core.files import JsonObject, publish_file
from modicum.core.units import format_bytes
from modicum.report.facts import kinds_of
from modicum.report.numbers import in_bytes
from modicum.report.plots import KINDS, phase_title, rank

SUFFIXES = (".svg", ".png", ".pdf")
_COLOURS = dict(
    zip(
        KINDS,
        ("#3b6fb6", "#c8553d", "#8a5fa8", "#4f9d69", "#d9a441", "#7f8c8d", "#a6b1b7", "#c9c9c9"),
        strict=True,
    )
)


def draw(row: JsonObject, file: Path, title: str) -> None:
    """Draw the forecast of a plan.

    Args:
        row: of `plan.jsonl`.
        file: what to write; its ending says of which kind.

    Raises:
        InputError: the ending is not one of `SUFFIXES`, or the file cannot be written.
    """
    check(file)
    library("matplotlib", "picture", "a picture")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    prediction = row["prediction"]
    phases = kinds_of(prediction)
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(phases)), layout="constrained")
    axes = figure.add_subplot()
    drawn: set[str] = set()
    for place, stack in enumerate(phases.values()):
        left = 0.0
        for kind in sorted(stack, key=rank):
            label = None if kind in drawn else kind
            drawn.add(kind)
            axes.barh(place, stack[kind], left=left, label=label, color=_COLOURS.get(kind, "#ccc"))
            left += stack[kind]
        axes.text(left, place, f" {format_bytes(left)}", va="center")
    if (limit := _tensor_budget(row)) is not None:
        axes.axvline(limit, color="#b00020", linestyle="--", label="budget, less the process's own")
    axes.set_yticks(range(len(phases)), labels=[phase_title(phase) for phase in phases])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: in_bytes(size)))
    axes.set_title(f"{title}: tensor bytes by phase of a step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    with publish_file(file) as made:
        figure.savefig(made, format=file.suffix[1:].lower())


def check(file: Path) -> None:
    """Refuse a file of another kind, before anything is computed.

    Raises:
        InputError: its ending is not one of `SUFFIXES`, its folder is not there, or nothing here
            draws.
    """
    if file.suffix.lower() not in SUFFIXES:
        allowed = f"a name that ends in {', '.join(SUFFIXES)}"
        raise InputError(
            "not a kind of picture", field="--picture", value=str(file), allowed=allowed
        )
    if not file.parent.is_dir():
        raise InputError("the folder is not there", field="--picture", value=str(file.parent))
    if find_spec("matplotlib") is None:  # to import it would count in the plan's process
        library("matplotlib", "picture", "a picture")


def _tensor_budget(row: JsonObject) -> float | None:
    """What of the budget is left for tensors."""
    prediction = row["prediction"]
    budget: float | None = prediction["budget_bytes"]
    return None if budget is None else budget - (prediction["process_base"] or 0)
