"""Is what a plan says true? Recipes over everything that exists, planned, and run as planned.

Each recipe is drawn with a budget of 0.7 to 1.4 times what it needs without one. Where its plan
fits, it runs under that budget; where it is refused, it runs anyway, with the choices that need
least. Peaks are those of run.json: tensors as the meter saw them, and what the process grew by.

    python benchmarks/plan_truth.py --seed 7             # thirty recipes, 95 minutes
    python benchmarks/plan_truth.py --seed 7 --count 3 --json --output FILE

A row for each recipe is appended to the progress file, so the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import alone, say, write_result
from plan_truth_cases import STEPS, Case, draw
from plan_truth_one import LEAST_BYTES, Row, pair, row_of
from plan_truth_peer import estimate

from modicum.core.files import write_json

KINDS = {"tensors": "tensor bytes", "process": "process minus base", "step": "time of a step"}
# Of the recipes that are drawn some do not combine, or are too small; so many draws are enough.
DRAWS = 12


def done_before(file: Path) -> dict[str, Row]:
    """The rows that an earlier start has appended, by name."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    return {row["name"]: row for row in rows}


def measured(
    seed: int,
    count: int,
    progress: Path,
    work: Path,
    run: Callable[[Case, Path], Row] = row_of,
) -> list[Row]:
    """Rows of the first `count` recipes that could be run; the others' stand before them too."""
    known, rows = done_before(progress), []
    for number in range(DRAWS * count):
        case = draw(seed, number)
        row = known.get(case.name)
        if row is None:
            say(f"{case.name}: {', '.join(case.words)}")
            row = with_peer(run(case, work), estimate(case))
            with progress.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            say(told(row))
        rows.append(row)
        if sum("left_out" not in each for each in rows) == count:
            break
    return rows


def with_peer(row: Row, peer: Row) -> Row:
    """The row with what `accelerate` says next to the tensors that were measured."""
    if "tensors" in row and "predicted" in peer:
        peer = pair(peer["predicted"], row["tensors"]["measured"])
    return row | {"accelerate": peer}


def told(row: Row) -> str:
    """A row as a line for people."""
    for key in ("left_out", "failed"):
        if key in row:
            return f"  {key.replace('_', ' ')}: {row[key]}"
    errors = [f"{name} {100 * row[name]['error']:+.1f} %" for name in KINDS]
    verdict = "refused" if row["refused"] else "fits"
    size = row["tensors"]["measured"] / 1e6
    held = f"held {row['held_of_budget']:.2f} of the budget"
    return f"  {size:.0f} MB; {', '.join(errors)}; {verdict}, {held}; {row['seconds']:.0f} s"


def summed(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that are promised, and how many recipes they are of."""
    ran = [row for row in rows if "tensors" in row]
    errors = {name: [abs(row[name]["error"]) for row in ran] for name in KINDS}
    refused = [row["held_of_budget"] for row in ran if row["refused"]]
    fits = [row["held_of_budget"] for row in ran if not row["refused"]]
    peer = [abs(row["accelerate"]["error"]) for row in ran if "error" in row["accelerate"]]
    return {
        "run": len(ran),
        "failed": sum("failed" in row for row in rows),
        "left_out": sum("left_out" in row for row in rows),
        "median_error": {name: median(found) for name, found in errors.items() if found},
        "worst_error": {name: max(found) for name, found in errors.items() if found},
        "fits": len(fits),
        "fits_that_exceed": sum(held > 1 for held in fits),
        "refused": len(refused),
        "refused_rightly": sum(held > 0.85 for held in refused) / len(refused) if refused else None,
        "accelerate": {
            "answers": len(peer),
            "median_error": median(peer) if peer else None,
            "worst_error": max(peer, default=None),
        },
    }


def main() -> None:
    """Draw, plan, run, print the figures, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30, help="recipes to run")
    parser.add_argument("--progress", type=Path, help="where rows are appended")
    parser.add_argument("--json", action="store_true", help="the result on standard output")
    parser.add_argument("--output", type=Path, help="write the result there, not among the others")
    asked = parser.parse_args()
    work = Path(tempfile.gettempdir()) / "modicum-plan-truth"
    work.mkdir(exist_ok=True)
    progress = asked.progress or work / f"{asked.seed}.jsonl"
    with alone():
        rows = measured(asked.seed, asked.count, progress, work)
    found = {**summed(rows), "rows": rows}
    if asked.output is None:
        write_result("plan_truth", found, {"seed": asked.seed, "steps": STEPS, "of": LEAST_BYTES})
    else:
        write_json(asked.output, found)
    if asked.json:
        print(json.dumps(found))
    else:
        print(json.dumps(summed(rows), indent=2))
    sys.exit(5 if found["failed"] else 0)


if __name__ == "__main__":
    main()
