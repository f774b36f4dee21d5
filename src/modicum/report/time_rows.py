"""Where a run's time went, as its run.json has it: groups of rows, their parts and their shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modicum.core.clock import (
    AGAIN,
    DATA,
    LOST,
    START,
    TRACKING,
    UNEXPLAINED,
    WAITING,
    WIRE,
    group_of,
)
from modicum.report.folder import FolderContents, section
from modicum.report.numbers import number, percent

_COMPUTE = "compute"
# In the order in which people look for them; others come before the last.
_ORDER = (
    START, _COMPUTE, DATA, WIRE, WAITING, "evaluation", "checkpoint", TRACKING, "surgery", "export",
    AGAIN, group_of(LOST),
)  # fmt: skip
# What an update is made of, which is what a plan forecasts.
_UPDATES = (_COMPUTE, DATA, WIRE, WAITING)


def groups(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a run.json's rows: `what`, `seconds`, `share` of all, and the `parts` of each.

    >>> rows = {"compute/forward": 6.0, "data": 1.0, "compute/update": 1.0, "unexplained": 2.0}
    >>> for group in groups({"time": {"rows": rows}}):
    ...     print(group["what"], group["share"], [part["what"] for part in group["parts"]])
    compute 0.7 ['forward', 'update']
    data 0.1 []
    unexplained 0.2 []
    """
    rows = {
        name: seconds
        for name, value in section(record, "time", "rows").items()
        if (seconds := number(value)) is not None and seconds >= 0
    }
    total = sum(rows.values())
    if not total:
        return []
    names = sorted(dict.fromkeys(map(group_of, rows)), key=_place)
    return [_group(name, rows, total) for name in names]


def _place(name: str) -> int:
    if name == UNEXPLAINED:
        return len(_ORDER) + 1
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _group(name: str, rows: Mapping[str, float], total: float) -> dict[str, Any]:
    own = {row: seconds for row, seconds in rows.items() if group_of(row) == name}
    seconds = sum(own.values())
    parts = [
        {"what": row.partition("/")[2] or "other", "seconds": value, "share": value / total}
        for row, value in own.items()
        if len(own) > 1 or "/" in row
    ]
    return {"what": name, "seconds": seconds, "share": seconds / total, "parts": parts}


def side_by_side(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Each group's name and what each run has of it: `seconds` and `share`, or None."""
    found = [{group["what"]: group for group in groups(record)} for record in records]
    names = sorted(dict.fromkeys(name for each in found for name in each), key=_place)
    return [(name, [each.get(name) for each in found]) for name in names]


def in_words(record: Mapping[str, Any], least: float = 0.005) -> str | None:
    """All groups with a share of at least `least`, and what is unexplained, in a line.

    >>> in_words({"time": {"rows": {"data": 1.0, "wire": 3.0}}})
    'time: data 25 %, wire 75 %, unexplained 0.0 %'
    """
    found = groups(record)
    if not found:
        return None
    shown = {group["what"]: group["share"] for group in found if group["share"] >= least}
    unexplained = sum(group["share"] for group in found if group["what"] == UNEXPLAINED)
    shown.pop(UNEXPLAINED, None)
    words = [f"{what} {percent(share)}" for what, share in shown.items()]
    return f"time: {', '.join([*words, f'{UNEXPLAINED} {percent(unexplained)}'])}"


def of_ranks(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each row that differs between ranks its median, its most, and the rank that has it."""
    found = []
    for name, of_row in section(record, "time", "ranks").items():
        of_row = of_row if isinstance(of_row, dict) else {}
        middle, most, rank = (number(of_row.get(key)) for key in ("median", "most", "rank"))
        if middle is not None and most is not None:
            found.append({"what": name, "median": middle, "most": most, "rank": rank})
    return found


def time_spent(run: FolderContents) -> dict[str, Any] | None:
    """What the page and `--json` say of it; None where the run does not."""
    found = groups(run.run)
    if not found:
        return None
    unexplained = sum(group["share"] for group in found if group["what"] == UNEXPLAINED)
    return {
        "groups": found,
        "unexplained": unexplained,
        "ranks": of_ranks(run.run),
        "updates": sum(group["seconds"] for group in found if group["what"] in _UPDATES),
        "checkpoint_writing": number(section(run.run, "time").get("checkpoint_writing")),
    }
