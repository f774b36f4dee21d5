"""A bench for exchanges in the trainer: recipes that differ in their exchange, on one link.

What is here runs at ranks that a benchmark has started.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from modicum.core.machine.links import keep_links
from modicum.core.ranks.link_bench import measure_links
from modicum.core.ranks.observed_calls import AGREEMENT
from modicum.core.ranks.pretended_link import Link, pretending
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.comm.curve_bench import SIZES
from modicum.proofs.comm.step_time_bench import Fields
from modicum.recipe import Recipe
from modicum.trainer import continued, train

SKIPPED = 4  # updates before those that are timed


def trained(
    ranks: Ranks,
    *,
    recipes: Mapping[str, Fields],
    rate: float = 0.0,
    latency: float = 0.0,
    alone: bool = False,
) -> dict[str, Any]:
    """Run each recipe to its end; rank 0 says what came of it.

    Args:
        rate, latency: of a pretended link; without a rate the link that is there.
        alone: each rank trains by itself, all at once: nothing travels.

    Returns:
        Of each recipe `seconds` of its updates but the first ones, `loss` of the last evaluation,
        `bytes`, `calls` and `ring_steps` of an update (the mean, without what ranks exchange to
        agree; of calls those that send something), `said` by the plan,
        the step that the first plan forecast (`forecast`; None: it cannot), and its row of the
        exchange that it chose (`chosen`).
    """
    link = Link(rate, latency) if rate else None
    found: dict[str, Any] = {}
    for label, values in recipes.items():
        with tempfile.TemporaryDirectory() as name, pretending(link):
            folder = Path(name)
            if not alone:  # one folder, rank 0's
                [place] = ranks.broadcast([name])
                folder = Path(place) / "run"
            found[label] = _run(Ranks() if alone else ranks, values, folder)
            ranks.gather(True)
    return found


def keeps_link(ranks: Ranks, *, rate: float = 0.0, latency: float = 0.0) -> dict[str, float]:
    """Measure the link, and keep it for plans, as `modicum bench link` does; what was measured.

    Args:
        rate, latency: of a pretended link; without a rate the link that is there.
    """
    with pretending(Link(rate, latency) if rate else None):
        measured = {axis: link for axis, (link, _) in measure_links(ranks, SIZES).items()}
    if ranks.first:
        keep_links(measured)
    [link] = measured.values()
    return {"latency": link.latency, "rate": link.rate, "cpu": link.cpu}


def _run(ranks: Ranks, values: Fields, folder: Path) -> dict[str, Any]:
    made = continued(Recipe(**values), folder, ranks=ranks)
    train(made, folder, ranks=ranks)
    ranks.gather(True)
    if not ranks.first:
        return {}
    steps, rounds = _rows(folder, "metrics"), _rows(folder, "evaluations")
    plan = _rows(folder, "plan")[0]
    forecast = plan["prediction"]
    speed = forecast.get("tokens_per_second")
    chosen = [row for row in plan["choices"] if row["field"] == "comm"]
    updates = [
        [call for call in row["calls"] if call["label"] != AGREEMENT and call["bytes"]]
        for row in _rows(folder, "wire")
        if not row.get("left_out")
    ]
    updates = updates[len(updates) % 2 :]  # factors may be sent by turns
    return {
        "seconds": [row["seconds"] for row in steps[SKIPPED:]],
        "loss": rounds[-1]["loss"] if rounds else None,
        "bytes": _mean(sum(call["bytes"] for call in calls) for calls in updates),
        "calls": _mean(len(calls) for calls in updates),
        "ring_steps": _mean(sum(map(_ring_steps, calls)) for calls in updates),
        "said": forecast.get("wire_bytes", 0),
        "forecast": plan["tokens_per_update"] / speed if speed else None,
        "chosen": chosen[0] if chosen else None,
    }


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.mean(known) if known else 0.0


def _ring_steps(call: Mapping[str, Any]) -> int:
    """Steps of a ring that a call of `wire.jsonl` takes.

    >>> _ring_steps({"kind": "all-reduce", "ranks": 4}), _ring_steps({"kind": "x", "ranks": 4})
    (6, 3)
    """
    around = int(call["ranks"]) - 1
    return around * (2 if call["kind"] == "all-reduce" else 1)


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / f"{name}.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
