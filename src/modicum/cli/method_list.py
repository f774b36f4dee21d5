"""The catalog as people read it: `modicum methods`, a method in a line where there is room."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from modicum.cli.plain_tables import WIDTH
from modicum.cli.tables import print_json
from modicum.core.contracts.method import NOT_ON_GPU, RUN_ON_GPU

_NONE = "–"  # where nothing was checked, or nothing is shown
_CHECKED = {"verified against code": "code", "against paper": "paper", "reconstructed": _NONE}
_CLAIM = {"not shown here": _NONE, "does not hold": "no", "holds": "holds", "in part": "in part"}
_HEADERS = ("Checked", "Claim", "Against", "Loads in", "What it is")
# A title's column is no narrower than this: else titles stand below, at the full width.
_TITLE = 30
_WIDE = 100  # columns from which on there is room to say where an adapter loads
_LEGEND = (
    "checked: against the authors' code, or the paper; –: reconstructed",
    "claim: how far the paper's headline was found here; –: not shown here",
    "against: how it stands against the best simple alternative at equal budget; –: not shown here",
    "`modicum methods NAME` says why, where a method loads, and what it takes",
)


def print_methods(
    records: Iterable[Mapping[str, Any]],
    as_json: bool,
    stream: TextIO | None = None,
    width: int | None = None,
) -> None:
    """Print the catalog: all of every record as JSON, or for a reader a list by room.

    What most methods have not done is said once, after the list, with what its words mean.

    Args:
        width: columns; None: of the terminal, or 80 elsewhere.
    """
    stream = stream or sys.stdout
    listed = list(records)
    if as_json:
        print_json(listed, stream)
        return
    terminal = stream.isatty()
    width = width or (shutil.get_terminal_size().columns if terminal else WIDTH)
    lines: list[tuple[str, str]] = []
    for room in dict.fromkeys(str(record.get("room")) for record in listed):
        lines += _room(room, [each for each in listed if each.get("room") == room], width)
        lines.append(("", ""))
    lines += [("", line) for said in [*_LEGEND, *_on_gpu(listed)] for line in _wrapped(said, width)]
    _write(lines, stream, terminal)


def _room(room: str, records: Sequence[Mapping[str, Any]], width: int) -> Iterator[tuple[str, str]]:
    """A room's lines, each with its style: the headers, then its methods."""
    rows = [_row(record, width >= _WIDE) for record in records]
    headers = (f"{room} ({len(rows)})", *_HEADERS)
    used = [max(len(row[i]) for row in rows) for i in range(5)]
    widths = [max(len(headers[i]), used[i]) if used[i] else 0 for i in range(5)]
    before = sum(each + 2 for each in widths if each)
    below = width - before < _TITLE
    for style, row in [("bold", headers), *(("", row) for row in rows)]:
        cells = "  ".join(
            f"{cell:<{each}}" for cell, each in zip(row, widths, strict=False) if each
        )
        title = row[5]
        if below:
            yield style, cells.rstrip()
            yield from (("", f"  {line}") for line in _wrapped(title, width - 2) if not style)
            continue
        first, *others = _wrapped(title, width - before) or [""]
        yield style, f"{cells}  {first}".rstrip()
        yield from ((style, " " * before + line) for line in others)


def _row(record: Mapping[str, Any], loads: bool) -> tuple[str, str, str, str, str, str]:
    """Name, how it was checked, both parts of its verdict, where it loads, what it is."""
    name, against = str(record.get("name")), record.get("against") or {}
    evidence, result = str(record.get("status")).partition(";")[0], against.get("result")
    return (
        name,
        _CHECKED.get(evidence, _NONE),
        _CLAIM.get(str(record.get("claim_verdict")), _NONE),
        _NONE if result in (None, "not shown here") else str(result),
        str(record.get("loads_in") or "") if loads else "",
        _without_name(str(record.get("title")), name),
    )


def _without_name(title: str, name: str) -> str:
    """A title without the name that stands before its colon.

    >>> _without_name("LoRA-FA: LoRA with a frozen down factor", "lora_fa")
    'LoRA with a frozen down factor'
    """
    first, _, what = title.partition(": ")
    same = re.sub(r"\W|_", "", first).lower() == re.sub(r"\W|_", "", name).lower()
    return what if same and what else title


def _on_gpu(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which methods were not run on an accelerator, where there are any."""
    run = [str(each["name"]) for each in records if f"; {RUN_ON_GPU}" in str(each.get("status"))]
    if not records or len(run) == len(records):
        return []
    rest = [name for each in records if (name := str(each["name"])) not in run]
    if not run:
        return [f"{NOT_ON_GPU}: all"]
    which = ", ".join(rest) if len(rest) <= len(run) else f"all but {', '.join(run)}"
    return [f"{NOT_ON_GPU}: {which}"]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)


def _write(lines: Iterable[tuple[str, str]], stream: TextIO, terminal: bool) -> None:
    """Write lines with their style, which a terminal alone shows."""
    if not terminal:
        stream.writelines(f"{line}\n" for _, line in lines)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for style, line in lines:
        console.print(Text(line, style), soft_wrap=True)
