"""Small tables as HTML, as notebooks show values that have a `_repr_html_`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def html_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table under a title; nothing in a cell is read as HTML, None is an empty cell.

    >>> html_table("Plan", ("choice",), [("<auto>",)])
    '<p><b>Plan</b></p><table><tr><th>choice</th></tr><tr><td>&lt;auto&gt;</td></tr></table>'
    """
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    lines = [
        "".join(f"<td>{'' if cell is None else escape(str(cell))}</td>" for cell in row)
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in (head, *lines) if line)
    return f"<p><b>{escape(title)}</b></p><table>{body}</table>"
