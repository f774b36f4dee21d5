"""Promises as a table in the README: what each says, its bar, its figure and whether it is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from modicum.cli.readme import between

BEGIN, END = "<!-- promises:begin -->", "<!-- promises:end -->"


def with_table(readme: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The README's text with the table of `rows` between its two markers; as it is without them."""
    return between(readme, BEGIN, END, markdown(rows))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table, with the machines that they were measured on beneath it."""
    if not rows:
        return ""
    lines = ["| promise | bar | measured | kept |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (row["sentence"], with_unit(row["bar"], row), shown(row), _mark(row))
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    places = [(row["machine"], row["when"][:10]) for row in rows if row["when"]]
    machines = dict.fromkeys(", ".join(filter(None, place)) for place in places)
    measured = f"Measured on: {'; '.join(machines)}." if machines else "Nothing is measured yet."
    return "\n".join([*lines, "", measured, ""])


def _mark(row: Mapping[str, Any]) -> str:
    return "yes" if row["kept"] else "**no**"


def shown(row: Mapping[str, Any]) -> str:
    """A row's figure, with its date where it was read and not measured; or why there is none."""
    figure = row["figure"]
    if figure is None:
        return str(row.get("problem", "–"))
    if isinstance(figure, float):
        figure = f"{figure:.3g}"
    elif isinstance(figure, bool):
        figure = json.dumps(figure)
    told = with_unit(str(figure), row)
    return f"{told} (read from {row['when'][:10]})" if row.get("read") else told


def with_unit(text: str, row: Mapping[str, Any]) -> str:
    """A figure or a bar with the row's unit."""
    return f"{text} {row['unit']}".rstrip()
