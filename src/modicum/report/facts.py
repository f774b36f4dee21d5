"""The facts of a run: what was planned, what happened, and how far apart they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modicum.core.files import JsonObject
from modicum.core.plain_values import finite
from modicum.report.columns import BY_CLASS, SKIPPED, StepColumns
from modicum.report.folder import FolderContents, listing, read, section
from modicum.report.numbers import as_count, number
from modicum.report.time_rows import time_spent
from modicum.report.wire_rows import wire

STATUSES = ("finished", "running", "interrupted", "failed")
# Kinds that lie elsewhere than what a phase's total counts.
_ELSEWHERE = ("host", "disk")


def summary(folder: str | Path) -> dict[str, Any]:
    """What `--json` prints about a run: strict JSON, None where a figure is not known.

    Bytes, seconds, losses in nats per trained token, and tokens/s that are read, prompts and
    padding among them; `tokens` are those that were trained. A comparison's `difference` is
    measured / predicted - 1.

    Raises:
        InputError: there is no such run folder.
    """
    return facts(read(folder))


def facts(run: FolderContents) -> dict[str, Any]:
    """`summary` of a folder that has been read: run.json first, then what the other files say."""
    record, metrics = run.run, run.metrics
    status = record.get("status")
    seconds = number(record.get("seconds"))
    spent = metrics.total("seconds")
    tokens = _first(record.get("tokens"), as_count(metrics.total("tokens")))
    rate = number(record.get("tokens_per_second"))
    if rate is None and spent and (read := _read(metrics)):
        rate = read / spent
    peak = _peak_bytes(run)
    parameters = section(record, "parameters") or section(_last(run.plans), "parameters")
    result = {
        "folder": str(run.path),
        "name": run.name,
        "status": status if status in STATUSES else "unknown",
        "error": record.get("error"),
        "modicum": record.get("modicum"),
        "started": record.get("started"),
        "ended": record.get("ended"),
        "seconds": _first(seconds, spent),
        "steps": _first(record.get("steps"), as_count(metrics.steps[-1]) if metrics else None),
        "steps_planned": _first(
            record.get("steps_planned"), section(run.recipe, "training").get("steps")
        ),
        "unit": unit(run),
        "data": section(record, "data"),
        "steps_skipped": len(metrics.arrays(SKIPPED)[1]),
        "tokens": tokens,
        "tokens_per_second": rate,
        "data_wait": number(record.get("data_wait")),
        "time": time_spent(run),
        "wire": wire(run),
        "parameters": {name: number(parameters.get(name)) for name in ("total", "trainable")},
        "loss": _losses(run),
        "peak_bytes": peak,
        "budget_kept": budget_kept(run, peak),
        "plan_revisions": len(run.plans),
        "interruptions": number(record.get("interruptions")),
        "best": section(record, "best") or None,
        "test": section(section(record, "final"), "test") or None,
        "stopped_early": number(record.get("stopped_early")),
        "outputs": section(record, "outputs"),
        "cost": section(record, "cost") or None,
        "saves": section(record, "saves") or None,
        "notes": [*run.notes, *_changing_rank(run)],
    }
    return finite(result | {"comparison": comparison(run, result)})


def _changing_rank(run: FolderContents) -> list[str]:
    """Why the bytes of an exchange whose rank changes are not those of its plan."""
    rank = section(run.recipe, "comm").get("rank")
    if not run.wire or not isinstance(rank, list) or [type(each) for each in rank] != [int] * 3:
        return []
    first, last, updates = rank
    said = f"comm.rank goes from {first} to {last} in {updates} updates"
    return [f"{said}: what the plan says of the wire is for the larger of them."]


def unit(run: FolderContents) -> str:
    """What losses are means over and `tokens` counts, as a plural: tokens, unless the run says."""
    said = run.run.get("unit")
    return said if isinstance(said, str) and said else "tokens"


def _first(*values: Any) -> Any:
    return next((known for value in values if (known := number(value)) is not None), None)


def _last(rows: list[JsonObject]) -> JsonObject:
    return rows[-1] if rows else {}


def _read(metrics: StepColumns) -> float:
    """Tokens that were read in all steps: what the rows' speeds say."""
    import numpy

    (rated, rates), (timed, seconds) = map(metrics.arrays, ("tokens_per_second", "seconds"))
    _, of_rates, of_seconds = numpy.intersect1d(
        rated, timed, assume_unique=True, return_indices=True
    )
    return float(rates[of_rates] @ seconds[of_seconds])


def _peak_bytes(run: FolderContents) -> dict[str, Any]:
    told, predicted = section(run.run, "peak_bytes"), section(_last(run.plans), "prediction")
    return {
        "predicted": _first(told.get("predicted"), predicted.get("peak_bytes")),
        "measured": number(told.get("measured")),
        "process": _first(told.get("process"), as_count(run.metrics.greatest("bytes"))),
        "process_predicted": _first(told.get("process_predicted"), predicted.get("process_bytes")),
        "base": _first(told.get("base"), predicted.get("process_base")),
        "budget": _first(told.get("budget"), predicted.get("budget_bytes")),
    }


def _losses(run: FolderContents) -> dict[str, Any]:
    final, checked = section(run.run, "final"), run.evaluations
    trained = run.metrics.values("loss")
    before = dict(zip(*checked.points("loss"), strict=True)).get(0)
    begins = len(checked) > 0 and checked.steps[0] == 0
    return {
        "final": _first(final.get("loss"), trained[-1] if trained else None),
        "validation": _first(final.get("validation_loss"), checked.last("loss")),
        "initial_validation": _first(
            final.get("initial_validation_loss"), before if begins else None
        ),
        "test": number(section(final, "test").get("loss")),
    }


def measures(run: FolderContents) -> list[dict[str, Any]]:
    """The metrics of the evaluations: before training, after it, the best of the run, and the test.

    Each class's share of right answers is a row of its own.
    """
    checked, tested = run.evaluations, StepColumns([section(section(run.run, "final"), "test")])
    best = number(section(run.run, "best").get("step"))
    before = checked.row(0)
    after, test = (each.row(each.steps[-1]) if len(each) else {} for each in (checked, tested))
    at_best = {} if best is None else checked.row(best)
    return [
        {
            "what": _measure(name),
            "before": before.get(name),
            "after": after.get(name),
            "best": at_best.get(name),
            "test": test.get(name),
        }
        for name in {**after, **test}
        if name not in ("seconds", "tokens", "rows", unit(run))
    ]


def _measure(name: str) -> str:
    first, _, of_class = name.partition(f"{BY_CLASS}.")
    return f"accuracy of {of_class}" if of_class and not first else name.replace("_", " ")


def counted(run: FolderContents) -> str:
    """Which of the peaks a memory budget is about: tensors on an accelerator, else the process."""
    return "measured" if section(run.run, "machine").get("accelerator") else "process"


def budget_kept(run: FolderContents, peak: dict[str, Any]) -> bool | None:
    """Whether the peak stayed within the budget; None without a budget or a measurement."""
    measured, budget = peak[counted(run)], peak["budget"]
    return None if measured is None or budget is None else measured <= budget


def comparison(run: FolderContents, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Plan next to what happened: the first plan's figure, the last plan's, and the measured."""
    first = section(run.plans[0], "prediction") if run.plans else {}
    last, peak = section(_last(run.plans), "prediction"), result["peak_bytes"]
    whole = result["status"] == "finished"
    what, took = "Time", result["seconds"]
    if (time := result["time"]) is not None:  # then it is known what of it were updates
        what, took = "Time of the updates", time["updates"]
    rows = [
        ("Tensors at the peak", "bytes", "peak_bytes", peak["predicted"], peak["measured"]),
        ("Process at the peak", "bytes", "process_bytes", peak["process_predicted"],
         peak["process"]),
        ("Of it Python and torch, before the first tensor", "bytes", "process_base", peak["base"],
         None),
        ("Speed", "tokens/s", "tokens_per_second", last.get("tokens_per_second"),
         result["tokens_per_second"]),
        (what, "seconds", "seconds", last.get("seconds"), took),
    ]  # fmt: skip
    table = []
    for what, unit, key, predicted, measured in rows:
        predicted = number(predicted)
        comparable = predicted and measured is not None and (whole or unit != "seconds")
        table.append(
            {
                "what": what,
                "unit": unit,
                "first_plan": number(first.get(key)),
                "predicted": predicted,
                "measured": measured,
                "difference": measured / predicted - 1 if comparable else None,
            }
        )
    return table


def kinds_by_phase(run: FolderContents) -> dict[str, dict[str, float]]:
    """Predicted bytes {phase: {kind: bytes}} on the device, of the last plan."""
    return kinds_of(section(_last(run.plans), "prediction"))


def kinds_of(prediction: JsonObject) -> dict[str, dict[str, float]]:
    """Bytes {phase: {kind: bytes}} on the device, of a plan's prediction.

    What a phase's total has beyond the items that the plan lists for it is of kind "other".
    """
    items: dict[str, dict[str, float]] = {}
    for row in listing(prediction, "table"):
        kind, size = str(row.get("kind")), number(row.get("bytes"))
        if not size or kind in _ELSEWHERE:
            continue
        for phase in str(row.get("phase")).split(", "):
            of_phase = items.setdefault(phase, {})
            of_phase[kind] = of_phase.get(kind, 0) + size
    always = items.pop("always", {})
    totals = {
        phase: size
        for phase, total in section(prediction, "by_phase").items()
        if (size := number(total)) is not None
    }
    result = {}
    for phase in [*totals, *(name for name in items if name not in totals)]:
        stack = dict(always)
        for kind, size in items.get(phase, {}).items():
            stack[kind] = stack.get(kind, 0) + size
        rest = totals.get(phase, 0) - sum(stack.values())
        if rest > 0.005 * totals.get(phase, 0):
            stack["other"] = rest
        if stack:
            result[phase] = stack
    return result


def kinds_measured(run: FolderContents) -> list[dict[str, Any]]:
    """For each kind of tensor, the most predicted in any phase next to what was measured."""
    measured = section(run.run, "measured_by_kind")
    phases = kinds_by_phase(run).values()
    predicted: dict[str, float] = {}
    for stack in phases:
        for kind, size in stack.items():
            predicted[kind] = max(size, predicted.get(kind, 0))
    rows = []
    for kind in [*predicted, *(name for name in measured if name not in predicted)]:
        before, after = predicted.get(kind), number(measured.get(kind))
        difference = after / before - 1 if before and after is not None else None
        rows.append(
            {"kind": kind, "predicted": before, "measured": after, "difference": difference}
        )
    return rows
