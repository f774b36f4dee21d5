"""What a run sent, as its wire.jsonl has it, next to what the plan's ledger says."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean, median
from typing import Any

from modicum.core.files import JsonObject
from modicum.core.ranks.observed_calls import AGREEMENT
from modicum.report.folder import FolderContents, listing, section
from modicum.report.numbers import as_count, number

_NOTHING = {"calls": 0.0, "bytes": 0.0, "waited": 0.0}


def wire(run: FolderContents) -> dict[str, Any] | None:
    """What the page and `--json` say of it; None where the run has one rank, or does not say.

    `rows` compare an update's bytes and calls by collective: what those that the file has in full
    usually have, and the last plan's. What ranks exchange to agree on something is apart.
    """
    updates = [row for row in run.wire if listing(row, "calls")]
    if not updates:
        return None
    full = [row for row in updates if not number(row.get("left_out"))] or updates
    so_far = section(run.wire[-1], "so_far")
    plan = section(run.plans[-1], "prediction") if run.plans else {}
    return {
        "updates": number(so_far.get("updates")),
        "bytes": number(so_far.get("bytes")),
        "calls": number(so_far.get("calls")),
        "waited": number(so_far.get("waited")),
        "kept": len(run.wire),
        "every": number(run.wire[-1].get("every")),
        "rows": _compared(full, listing(plan, "wire") if "wire" in plan else None),
        "agreement": _usual([_sums(row).get(AGREEMENT, _NOTHING) for row in full]),
    }


def drawn(run: FolderContents) -> JsonObject | None:
    """The update that the page draws: the last one with all of its calls; None: there is none."""
    with_calls = [row for row in run.wire if listing(row, "calls")]
    full = [row for row in with_calls if not number(row.get("left_out"))] or with_calls
    return full[-1] if full else None


def kind_of(call: JsonObject) -> str:
    """What a call is listed under: its collective, or that it only lets ranks agree."""
    return AGREEMENT if call.get("label") == AGREEMENT else str(call.get("kind"))


def _sums(row: JsonObject) -> dict[str, dict[str, float]]:
    """Calls, bytes and seconds waited of an update, by collective."""
    sums: dict[str, dict[str, float]] = {}
    for call in listing(row, "calls"):
        own = sums.setdefault(kind_of(call), dict(_NOTHING))
        own["calls"] += 1
        own["bytes"] += number(call.get("bytes")) or 0
        own["waited"] += number(call.get("waited")) or 0
    return sums


def _usual(sums: Iterable[dict[str, float]]) -> dict[str, Any]:
    """What an update usually has: medians of counts, the mean of the time waited.

    Some methods send one thing in odd updates and another in even ones, so the counts are means of
    two updates that follow one another in the file.
    """
    found = list(sums)
    latest = found[len(found) % 2 :] or found
    usual = {}
    for name in ("calls", "bytes"):
        counts = [each[name] for each in latest]
        pairs = zip(counts[::2], counts[1::2] or counts, strict=True)
        usual[name] = as_count(median(map(mean, pairs)))
    return usual | {"waited": mean(each["waited"] for each in found)}


def _compared(updates: list[JsonObject], said: list[JsonObject] | None) -> list[dict[str, Any]]:
    sums = [_sums(row) for row in updates]
    forecast: dict[str, list[float]] = {}
    for row in said or ():
        own = forecast.setdefault(str(row.get("collective")).replace("_", "-"), [0, 0])
        own[0] += number(row.get("bytes")) or 0
        own[1] += number(row.get("calls")) or 0
    kinds = dict.fromkeys([*forecast, *(kind for each in sums for kind in each)])
    return [
        {
            "collective": kind,
            "predicted_bytes": None if said is None else forecast.get(kind, [0, 0])[0],
            "predicted_calls": None if said is None else forecast.get(kind, [0, 0])[1],
            **_usual([each.get(kind, _NOTHING) for each in sums]),
        }
        for kind in kinds
        if kind != AGREEMENT
    ]
