"""Tables on a terminal, by rich, which is imported when one is made."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any, TextIO

from modicum.cli.plain_tables import longest_path

_LEAST = 16  # columns of a terminal for each other column of a table, with the space around it


def print_rich(
    headers: Sequence[str],
    cells: Sequence[Sequence[str]],
    right: Sequence[bool],
    title: str | None,
    stream: TextIO,
) -> None:
    """Print the table at the terminal's width."""
    from rich.console import Console

    Console(file=stream, highlight=False).print(rich_table(headers, cells, right, title))


def rich_table(
    headers: Sequence[str],
    cells: Sequence[Sequence[str]],
    right: Sequence[bool],
    title: str | None = None,
) -> Any:
    """The same table as rich's, with a first column that stands out and nothing read as markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    made.title = Text(title) if title else None
    for place, (header, to_right) in enumerate(zip(headers, right, strict=True)):
        made.add_column(
            Text(header),
            justify="right" if to_right else "left",
            style="cyan" if place == 0 else "",
            header_style="dim",
            overflow="fold",
            width=_path_width(place, cells, len(headers)),
        )
    for row in cells:
        made.add_row(*(Text(cell) for cell in row))
    return made


def _path_width(place: int, cells: Sequence[Sequence[str]], count: int) -> int | None:
    """The width of a column with a path, which breaks none; None: none, or no room for it."""
    longest = longest_path(row[place] for row in cells if place < len(row))
    others = _LEAST * (count - 1)
    return longest if 0 < longest <= shutil.get_terminal_size().columns - others else None
