"""A hook of mkdocs: the page on how true plans are.

Its figures are those of `benchmarks/plan_truth.py`, and on a GPU of `benchmarks/gpu.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
PLACE = "reference/forecasts.md"
SAID = """# Forecasts

`benchmarks/plan_truth.py` draws recipes over tasks, models of this package and of transformers,
methods of the catalog, adapters on compressed models, starts from an adapter, precisions, bases in
16 bits, micro-batches, one rank and two, checkpoints, evaluations, samples, streams, exports. One
thing is in no forecast: a text that a model without keys and values reads anew for each token.

Each is planned with a budget of 0.7 to 1.4 times what it needs without one. Where the plan says
that it fits, it runs under that budget, alone in a process; where it is refused, it runs anyway,
with the choices that need least. Tensors take at least 200 MB.
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
    content = page(_result("plan_truth"), _result("gpu"))
    files.append(File.generated(config, PLACE, content=content))
    return files


def _result(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def page(found: dict[str, Any] | None, on_gpu: dict[str, Any] | None = None) -> str:
    """The page of a result and of one on a GPU; None: there is none yet."""
    rest = [] if on_gpu is None else ["", *_on_gpu(on_gpu)]
    if found is None:
        return "\n".join([SAID + NOT_YET, *rest])
    ran = [row for row in found["rows"] if "tensors" in row]
    return "\n".join([SAID, *_summary(found), "", *_table(ran), "", *_aside(found), *rest])


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
        f"Of {found['run']} recipes (seed {found['settings']['seed']}) {found['fits']} were said "
        f"to fit, and {found['fits_that_exceed']} of these took more than their budget. "
        f"{refused} were refused{share}.",
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


def _on_gpu(found: dict[str, Any]) -> list[str]:
    """Large models on a card: what the plan said, and what came."""
    lines = [
        "## On a GPU",
        "",
        f"Random weights in the shapes of published models, on one {found['settings']['card']} "
        f"with PyTorch {found['versions']['torch']} (`python benchmarks/gpu.py`). The allocator "
        "keeps more than the tensors; a plan does not count that. A step's time is not forecast "
        "well there: what starting many small kernels costs is not in it, and what large products "
        "reach is underrated.",
        "",
        "| run | tensors, GB | forecast | kept by the allocator | step, s | forecast | tokens/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["forecasts"]:
        tensors, kept = row["peak"]["measured"] / 1e9, row["reserved"] / 1e9
        lines.append(
            f"| {row['name']} | {tensors:.2f} | {row['tensors_error']:+.1%} | {kept:.2f} | "
            f"{row['step']:.3f} | {row['step_predicted']:.3f} | {row['tokens_per_second']:,.0f} |"
        )
    seen = [row for row in found["methods"] if "losses_apart" in row and not row["faults"]]
    worst = max(row["losses_apart"] for row in seen)
    lines += [
        "",
        f"On the same card {len(seen)} recipes, of every method that runs on one process but for "
        f"those below, trained a small model: losses in fp32 were at most {worst:.0e} from the "
        "CPU's, relatively, and runs that were stopped resumed to the bit.",
    ]
    if short := found["settings"].get("cut_short"):
        lines += ["", f"Not run: {short}."]
    return lines
