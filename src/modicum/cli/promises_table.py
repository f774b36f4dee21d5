"""Promises as tables: what each says, its bar, its figure and whether it is kept.

The README has those that a newcomer asks for, a page of the documentation has all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.cli.readme import between

BEGIN, END = "<!-- promises:begin -->", "<!-- promises:end -->"
PAGE = Path("docs") / "reference" / "promises.md"


def with_table(text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A page with the table of `rows` between its two markers; as it is without them."""
    return between(text, BEGIN, END, markdown(rows))


def with_chosen(readme: str, rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, str]) -> str:
    """The README with a table of a few of the rows, and how many of all are kept.

    Args:
        chosen: by id, the sentence there; without any the table has all rows.
    """
    if not chosen or not rows:
        return with_table(readme, rows)
    few = markdown([{**row, "sentence": chosen[row["id"]]} for row in rows if row["id"] in chosen])
    return between(readme, BEGIN, END, f"{few}\n{_sum(rows)}\n")


def _sum(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many promises are kept, and where all of them are."""
    kept = sum(bool(row["kept"]) for row in rows)
    return f"{kept} of {len(rows)} promises are kept: [every one]({PAGE.as_posix()})."


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
    return f"{told} (measured {row['when'][:10]})" if row.get("read") else told


def with_unit(text: str, row: Mapping[str, Any]) -> str:
    """A figure or a bar with the row's unit."""
    return f"{text} {row['unit']}".rstrip()
