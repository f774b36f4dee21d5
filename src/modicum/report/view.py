"""Everything that the page of one run shows."""

from __future__ import annotations

from typing import Any

from modicum.core.files import JsonObject
from modicum.data.fitting import too_long_words
from modicum.data.image_files import class_words
from modicum.recipe import methods_for
from modicum.report import facts as told
from modicum.report import numbers, plots
from modicum.report.call_plot import call_plot, kinds_drawn
from modicum.report.events import events
from modicum.report.folder import FolderContents, listing, section
from modicum.report.recipes import fields
from modicum.report.samples import samples
from modicum.report.subject import subject
from modicum.report.wire_rows import drawn


def view(run: FolderContents) -> dict[str, Any]:
    """Everything that the template shows."""
    result = told.facts(run)
    prediction = section(run.plans[-1], "prediction") if run.plans else {}
    peak, phases = result["peak_bytes"], told.kinds_by_phase(run)
    kinds = dict.fromkeys(kind for stack in phases.values() for kind in stack)
    recipe, update = fields(run.recipe), drawn(run)
    return {
        "facts": result,
        "run": run,
        "subject": subject(run.recipe, run.run.get("directory")),
        "counted": told.counted(run),
        "loss": result["loss"],
        "peak": peak,
        "peak_counted": peak[told.counted(run)],
        "measures": told.measures(run),
        "best_step": numbers.number(section(run.run, "best").get("step")),
        "events": events(run),
        "memory": plots.bars(phases, peak["budget"], peak["measured"]),
        "kinds": sorted(kinds, key=plots.rank),
        "by_kind": sorted(told.kinds_measured(run), key=lambda row: plots.rank(row["kind"])),
        "ledger": listing(prediction, "table"),
        "wire_drawn": "" if update is None else call_plot(update),
        "wire_kinds": [] if update is None else kinds_drawn(update),
        "wire_step": None if update is None else numbers.number(update.get("step")),
        "samples": samples(run.samples),
        "findings": findings(run.findings, run.recipe),
        "data_lines": data_lines(result),
        "cost_lines": cost_lines(result, prediction),
        "changed": [field for field in recipe if field.changed],
        "unchanged": [field for field in recipe if not field.changed],
        "choices": listing(run.plans[-1], "choices") if run.plans else [],
        "revisions": revisions(run.plans),
        "versions": section(run.run, "versions"),
        "machine": machine(section(run.run, "machine")),
    }


def findings(found: JsonObject, recipe: JsonObject) -> list[dict[str, Any]]:
    """A table for each method that looked: its rows in the columns that the first one has.

    Columns of words come first: the verdict on a row must not be out of sight behind its numbers.

    Args:
        recipe: whose sections name the methods, which say what their columns mean (`about`).
    """
    tables = []
    for name in found:
        if rows := listing(found, name):
            names = sorted(rows[0], key=lambda column: not isinstance(rows[0][column], str))
            cells = [[_cell(row.get(column)) for column in names] for row in rows]
            columns = [
                {"title": name.replace("_", " "), "number": not isinstance(rows[0][name], str)}
                for name in names
            ]
            method = section(recipe, name).get("method")
            record = methods_for(name).get(method) if isinstance(method, str) else None
            tables.append({
                "name": name, "columns": columns, "rows": cells,
                "step": numbers.number(found.get("step")),
                "method": record and record.name, "about": record.description if record else [],
            })  # fmt: skip
    return tables


def _cell(value: Any) -> str:
    """What a table shows of a value."""
    number = numbers.number(value)
    if number is None:
        return value if isinstance(value, str) else numbers.NONE
    return f"{value:,}" if type(value) is int else f"{number:.3g}"


def data_lines(result: dict[str, Any]) -> list[str]:
    """What packing made of the data, in sentences; none where the run does not say."""
    counts, lines = section(result, "data"), []
    rows, documents, trained, waste = (
        numbers.number(counts.get(key)) for key in ("rows", "documents", "trained", "waste")
    )
    about = ""
    if counts.get("streamed"):
        lines.append("Streamed: read, tokenized and packed as training asked for it.")
        about = "By its first part, about "
    if rows is not None and documents is not None and trained is not None:
        taken = numbers.number(result.get("tokens")) or 0
        often = f"the run trained them {taken / trained:.3g} times each, on average; "
        lines.append(
            f"{about}{documents:,} documents make {rows:,} rows with {trained:,} trained tokens; "
            f"{often if taken and trained else ''}"
            f"{numbers.percent(waste or 0.0)} of the rows is padding."
        )
    elif rows and documents is None:  # a task that is not of texts in rows
        taken = numbers.number(result.get("tokens")) or 0
        often = f", each of which the run trained {taken / rows:.3g} times, on average"
        lines.append(f"{rows:,} {result.get('unit')}{often if taken else ''}.")
    lines += source_lines(counts.get("sources"))
    known = {key: value for key, value in counts.items() if numbers.number(value) is not None}
    if words := too_long_words(known):
        lines.append(f"Longer than a row: {words}.")
    if empty := numbers.number(counts.get("empty")):
        lines.append(f"Left out, as nothing is learned in them: {empty:,}.")
    if classes := integers(section(counts, "classes")):
        lines.append(f"Classes: {class_words(classes)}.")
    if (wait := numbers.number(result.get("data_wait"))) is not None:
        lines.append(f"Steps waited for their rows for {numbers.percent(wait)} of their time.")
    return lines


def cost_lines(result: JsonObject, prediction: JsonObject) -> list[str]:
    """Money, energy and lost work, in sentences; none where nothing is stated of them."""
    cost, lines = section(result, "cost"), []
    planned = dict(numbers.spent(prediction))
    for name, said in numbers.spent(cost):
        by = f" ({cost.get('kwh_by')})" if name == "energy" else ""
        plan = f"; the last plan said {planned[name]} for the updates" if name in planned else ""
        lines.append(f"{name.capitalize()}: {said}{by}{plan}.")
    every, lost, share = (
        numbers.number(section(result, "saves").get(key))
        for key in ("every_seconds", "lost_seconds", "share")
    )
    if every is not None and lost is not None and share is not None:
        lines.append(
            f"Saved every {numbers.quantity(every, 'seconds')}: a failure loses "
            f"{numbers.quantity(lost, 'seconds')} of work on average; saves and lost work together "
            f"are expected to take {numbers.percent(share)} of the time."
        )
    return lines


def integers(values: JsonObject) -> dict[str, int]:
    """Those of a file's values that are counts."""
    return {name: value for name, value in values.items() if type(value) is int}


def source_lines(sources: Any) -> list[str]:
    """What each of several sources gave, in sentences; none of anything else than their list."""
    lines = []
    for source in sources if isinstance(sources, list) else ():
        if not isinstance(source, dict):
            continue
        share, passes = (numbers.number(source.get(key)) for key in ("share", "passes"))
        if share is not None and passes is not None:
            lines.append(
                f"{source.get('name')}: {numbers.percent(share)} of an epoch's rows, in which its "
                f"own are taken {passes:.3g} times."
            )
    return lines


def revisions(plans: list[JsonObject]) -> list[dict[str, Any]]:
    """Each revision of the plan: when, why, and the choices that it changed."""
    shown: list[dict[str, Any]] = []
    before: dict[str, Any] = {}
    for plan in plans:
        choices = {str(row.get("field")): row.get("value") for row in listing(plan, "choices")}
        changed = {name: value for name, value in choices.items() if before.get(name) != value}
        shown.append(
            {
                "revision": plan.get("revision"),
                "when": plan.get("when"),
                "why": plan.get("why"),
                "changed": changed,
            }
        )
        before = choices
    return shown


def machine(record: JsonObject) -> dict[str, str]:
    """The machine's record, with its units."""
    shown = {}
    for name, value in record.items():
        known = numbers.number(value)
        if name.endswith("_bytes") and known is not None:
            shown[name.removesuffix("_bytes")] = numbers.in_bytes(known)
        else:
            shown[name.replace("_", " ")] = "none" if value is None else str(value)
    return shown
