"""How many rows each class has in each part of the data, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modicum.cli.tables import table
from modicum.data.parts import TEST, TRAIN, VALIDATION

_TITLES = {TRAIN: "Training", VALIDATION: "Validation", TEST: "Test"}


def class_table(counts: Mapping[str, Mapping[str, int]], names: Sequence[str], title: str) -> None:
    """Print how many rows each class has, and all together.

    Args:
        counts: of each part, of each class.
        names: of the classes, in order.
    """
    lines = [(name, *(f"{each[name]:,}" for each in counts.values())) for name in names]
    lines.append(("all", *(f"{sum(each.values()):,}" for each in counts.values())))
    table(("Class", *(_TITLES[part] for part in counts)), lines, title=title)
