"""A hook of mkdocs: the page on how true plans are, by `benchmarks/plan_truth.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "plan_truth.json"
PLACE = "reference/forecasts.md"
SAID = """# Forecasts

`benchmarks/plan_truth.py` draws recipes over all that a recipe has a place for: tasks, models of
this package and of transformers, methods of the catalog, precisions, micro-batches, one rank and
two, checkpoints, evaluations. Each is planned with a budget of 0.7 to 1.4 times what it needs
without one. Where the plan says that it fits, it runs under that budget, alone in a process; where
it is refused, it runs anyway, with the choices that need least. Tensors take at least 200 MB.
"""
NOT_YET = "\nNothing is measured yet: `python benchmarks/plan_truth.py --seed N` does.\n"
COLUMNS = {"tensors": "tensors", "process": "process minus base", "step": "step"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give the page its place in the navigation."""
    [reference] = [item["Reference"] for item in config.nav or [] if "Reference" in item]
    reference.append({"Forecasts": PLACE})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else None
    files.append(File.generated(config, PLACE, content=page(found)))
    return files


def page(found: dict[str, Any] | None) -> str:
    """The page of a result; None: there is none yet."""
    if found is None:
        return SAID + NOT_YET
    ran = [row for row in found["rows"] if "tensors" in row]
    return "\n".join([SAID, *_summary(found), "", *_table(ran), "", *_aside(found)])


def _summary(found: dict[str, Any]) -> list[str]:
    """The figures over all recipes."""
    lines = ["| error of the forecast | median | largest |", "| --- | --- | --- |"]
    for name, title in COLUMNS.items():
        middle, worst = found["median_error"][name], found["worst_error"][name]
        lines.append(f"| {title} | {middle:.1%} | {worst:.1%} |")
    peer, refused = found["accelerate"], found["refused"]
    if peer["answers"]:
        middle, worst = peer["median_error"], peer["worst_error"]
        words = f"`accelerate estimate-memory`, tensors, on the {peer['answers']} that it answers"
        lines.append(f"| {words} | {middle:.1%} | {worst:.1%} |")
    rightly = found["refused_rightly"]
    share = "" if rightly is None else f", and {rightly:.0%} of these really took over 0.85 of it"
    lines += [
        "",
        f"Of {found['run']} recipes (seed {found['settings']['seed']}, on which nothing was "
        f"tuned) {found['fits']} were said to fit, and {found['fits_that_exceed']} of these took "
        f"more than their budget. {refused} were refused{share}.",
    ]
    return lines


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each recipe that ran."""
    lines = [
        f"| recipe | tensors, MB | {' | '.join(COLUMNS.values())} | of the budget | accelerate |",
        f"| --- | --- |{' --- |' * len(COLUMNS)} --- | --- |",
    ]
    for row in rows:
        errors = " | ".join(f"{row[name]['error']:+.1%}" for name in COLUMNS)
        held = f"{row['held_of_budget']:.2f}, {'refused' if row['refused'] else 'fits'}"
        peer = row["accelerate"]
        other = f"{peer['error']:+.1%}" if "error" in peer else peer["why_not"]
        size = row["tensors"]["measured"] / 1e6
        words = ", ".join(row["words"])
        lines.append(f"| {words} | {size:.0f} | {errors} | {held} | {other} |")
    return lines


def _aside(found: dict[str, Any]) -> list[str]:
    """What was drawn and not run."""
    return [
        f"Errors are relative to what was measured. {found['left_out']} recipes that were drawn do "
        "not combine, with the reason said, or were too small or too long for this page. "
        "`accelerate` is asked for the same model as its command builds it from config.json; it "
        "does not ask for rows or their length."
    ]
