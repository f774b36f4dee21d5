"""An update's calls over time, as SVG: what was under way when, and when compute waited for it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modicum.core.files import JsonObject
from modicum.report.folder import listing
from modicum.report.numbers import in_bytes, number, quantity
from modicum.report.wire_rows import kind_of

WIDTH = 720
_LANE, _GAP, _TICKS, _LEAST = 16, 4, 4, 1.5
_MOST_LANES = 12
# The roles of the page's colours, by collective.
ROLES = {
    "all-reduce": "weight",
    "reduce-scatter": "optimizer",
    "all-gather": "activation",
    "all-to-all": "workspace",
    "broadcast": "host",
    "agreement": "other",
}


@dataclass(frozen=True)
class _DrawnCall:
    kind: str
    label: str
    bytes: float
    asked: float
    begun: float
    ended: float
    waited: float


def call_plot(update: JsonObject) -> str:
    """The SVG of an update, a row of wire.jsonl; empty where nothing of it can be drawn.

    A call stands in the first lane that is free. A thin line leads to it from where it was asked
    for. Below are the times for which compute waited.

    >>> call = {"kind": "all-reduce", "bytes": 8, "asked": 0.0, "begun": 0.1, "ended": 0.3}
    >>> call_plot({"seconds": 0.5, "calls": [call | {"waited": 0.1}]}).count("<rect")
    2
    """
    seconds = number(update.get("seconds")) or 0.0
    calls = [found for call in listing(update, "calls") if (found := _read(call, seconds))]
    end = max([seconds, *(call.ended for call in calls)])
    if not calls or not end > 0:
        return ""
    lanes = _lanes(calls)
    count = max(lanes) + 1
    bottom = count * (_LANE + _GAP)
    height = bottom + _LANE + 28

    def at(instant: float) -> float:
        return round(WIDTH * max(0.0, min(instant, end)) / end, 2)

    parts = [
        f'<svg class="plot calls" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Calls of an update over time">'
    ]
    for call, lane in zip(calls, lanes, strict=True):
        parts += _call(call, lane * (_LANE + _GAP), bottom, at)
    for tick in range(_TICKS + 1):
        instant, anchor = (
            end * tick / _TICKS,
            ("start", "middle", "end")[(tick > 0) + (tick == _TICKS)],
        )
        parts.append(
            f'<text x="{at(instant)}" y="{height - 6}" text-anchor="{anchor}">'
            f"{html.escape(quantity(instant, 'seconds') if instant else '0 s')}</text>"
        )
    return "".join([*parts, "</svg>"])


def kinds_drawn(update: JsonObject) -> list[tuple[str, str]]:
    """The collectives of an update and the roles that they are drawn in, for a legend."""
    kinds = dict.fromkeys(kind_of(call) for call in listing(update, "calls"))
    return [(ROLES.get(kind, "buffer"), kind) for kind in kinds]


def _call(call: _DrawnCall, top: int, bottom: int, at: Any) -> list[str]:
    role = ROLES.get(call.kind, "buffer")
    lasted = quantity(call.ended - call.begun, "seconds")
    waited = quantity(call.waited, "seconds")
    name = f"{call.kind} of {call.label}" if call.label else call.kind
    told = html.escape(f"{name}: {in_bytes(call.bytes)}, {lasted}, waited for {waited}")
    left, right = at(call.begun), at(call.ended)
    parts = [f'<g style="--c: var(--{role})">']
    if left - at(call.asked) > 1:
        middle = top + _LANE / 2
        parts.append(f'<line x1="{at(call.asked)}" x2="{left}" y1="{middle}" y2="{middle}"/>')
    parts.append(
        f'<rect x="{left}" y="{top}" width="{max(_LEAST, right - left):.2f}" height="{_LANE}">'
        f"<title>{told}</title></rect>"
    )
    if call.waited > 0:
        begun = at(call.ended - call.waited)
        parts.append(
            f'<rect x="{begun}" y="{bottom}" width="{max(_LEAST, right - begun):.2f}" '
            f'height="{_LANE}"><title>waited: {told}</title></rect>'
        )
    return [*parts, "</g>"]


def _read(call: JsonObject, seconds: float) -> _DrawnCall | None:
    begun = number(call.get("begun"))
    if begun is None:
        return None
    asked, ended = number(call.get("asked")), number(call.get("ended"))
    return _DrawnCall(
        kind_of(call),
        str(call.get("label") or ""),
        number(call.get("bytes")) or 0,
        begun if asked is None else asked,
        begun,
        max(begun, seconds if ended is None else ended),
        number(call.get("waited")) or 0.0,
    )


def _lanes(calls: Sequence[_DrawnCall]) -> list[int]:
    """For each call the first lane in which nothing else is under way; the last one takes all."""
    free: list[float] = []
    found = []
    for call in calls:
        lane = next((n for n, until in enumerate(free) if until <= call.begun), len(free))
        lane = min(lane, _MOST_LANES - 1)
        if lane == len(free):
            free.append(0.0)
        free[lane] = max(free[lane], call.ended)
        found.append(lane)
    return found
