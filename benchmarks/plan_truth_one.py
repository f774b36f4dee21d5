"""One case of `plan_truth`: planned without a budget and with one, and run in a process alone."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from plan_truth_cases import Case
from plan_truth_models import adapter_folder, model_folder, norm_of, rows_file

from modicum.cli.allocator import tuned

# A forecast's error is promised from so many bytes of tensors on; a run of more takes too long.
LEAST_BYTES, MOST_BYTES = 200_000_000, 1_600_000_000
MOST_WORK = 6e11  # multiplications and additions of an update
PATIENCE = 600
# Where a run would take more of it than this, as in bf16 on a processor that has no instructions
# for it, the recipe is left out: it would fail here, whatever its forecasts are worth.
FORESEEN = PATIENCE / 3
# Updates that the meter slows down: it covers the first two.
METERED = 2
# A recipe that was refused is run with a budget that is no limit.
ROOM = 8_000_000_000

Row = dict[str, Any]


def row_of(case: Case, work: Path) -> Row:
    """What became of a case: `left_out` with the reason, or forecasts next to what was measured."""
    started = time.monotonic()
    folder = work / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    row: Row = {"name": case.name, "words": list(case.words), "ranks": case.ranks}
    asked = folder / "asked.json"
    asked.write_text(json.dumps([recipe_of(case, work), case.ranks, case.budget, case.factor]))
    code, said, error = _alone([sys.executable, __file__, str(asked)], case.ranks)
    if code:
        return row | {"failed": f"planning: {error}"}
    planned: Row = json.loads(said.splitlines()[-1])
    if "left_out" in planned:
        return row | planned
    row |= {"refused": planned["refused"], "budget": planned["budget"]}
    recipe = folder / "recipe.json"  # which YAML can read
    recipe.write_text(json.dumps(planned["recipe"]))
    out = folder / "run"
    command = [sys.executable, "-m", "modicum", "train", str(recipe), "--out", str(out)]
    command += [*(["--ranks", str(case.ranks)] if case.ranks > 1 else []), "--progress", "quiet"]
    code, _, error = _alone(command, case.ranks)
    if code:
        return row | {"failed": f"exit code {code}: {error}"}
    row |= _measured(out, planned)
    shutil.rmtree(folder, ignore_errors=True)
    return row | {"seconds": round(time.monotonic() - started, 1)}


def recipe_of(case: Case, work: Path) -> Row:
    """The recipe with the paths of its model and its data, which are made if they are not there."""
    text = json.dumps(case.recipe)
    if case.raw is not None:
        folder = model_folder(work, case.raw)
        text = text.replace("{model}", str(folder))
        if "{norm}" in text:
            text = text.replace("{norm}", norm_of(folder))
        if "{adapter}" in text:
            method = case.recipe["adapter"]["method"]
            text = text.replace("{adapter}", str(adapter_folder(folder, method)))
    if case.data is not None:
        text = text.replace("{data}", str(rows_file(work, case.data)))
    recipe: Row = json.loads(text)
    return recipe


def _alone(command: list[str], ranks: int) -> tuple[int, str, str]:
    """Run a command as `modicum train` runs; exit status, output, and the end of what it said."""
    environment = tuned(os.environ | {"OMP_NUM_THREADS": "1"}, ranks=ranks)
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"it took over {PATIENCE} s"
    return done.returncode, done.stdout, done.stderr.strip()[-400:]


def _measured(out: Path, planned: Row) -> Row:
    """Forecasts and measurements of a run that has ended."""
    run = json.loads((out / "run.json").read_text())
    plans = [json.loads(line) for line in (out / "plan.jsonl").read_text().splitlines()]
    first = plans[0]
    # What finds out the layers' sizes revises the plan before the first update.
    *_, known = takewhile(lambda row: not row["why"].startswith("speed measured"), plans)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    peak = run["peak_bytes"]
    grown, foreseen = peak["process"] - peak["base"], peak["process_predicted"] - peak["base"]
    seconds = known["tokens_per_update"] / known["prediction"]["tokens_per_second"]
    timed = statistics.median(step["seconds"] for step in steps[METERED:])
    held = peak["process"] if planned["kind"] == "memory" else grown
    return {
        "tensors": pair(peak["predicted"], peak["measured"]),
        "process": pair(foreseen, grown),
        "step": pair(seconds, timed),
        "base": peak["base"],
        "held_of_budget": held / planned["budget"],
        "choices": {each["field"]: each["value"] for each in first["choices"]},
        "ledger": known["prediction"]["ledger"],
    }


def pair(predicted: float, measured: float) -> Row:
    """A forecast next to what was measured; the error is relative to the latter."""
    return {
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1,
    }


def planned(recipe: Row, ranks: int, kind: str, factor: float) -> Row:
    """The recipe to run, and what its plan with a budget says.

    The budget is what the plan without one needs, times the factor. A recipe that is refused under
    it is run anyway, with the choices that need least.
    """
    from modicum.core.errors import DoesNotFit, InputError
    from modicum.planner import plan
    from modicum.planner.planning import plan_anyway
    from modicum.recipe import Recipe

    try:
        free = plan(Recipe(**recipe), ranks=ranks)
    except (InputError, DoesNotFit) as error:
        return {"left_out": str(error)}
    assert free.process_bytes is not None
    base = free.process_base if kind == "tensors" else 0
    budget = round(factor * (free.process_bytes - base))
    asked = {**recipe, "budget": {kind: budget}}
    found = {"kind": kind, "budget": budget, "refused": False, "recipe": asked}
    try:
        made = plan(Recipe(**asked), ranks=ranks)
    except DoesNotFit:
        made, _ = plan_anyway(Recipe(**asked), ranks=ranks)
        for choice in made.choices:
            section, _, name = choice["field"].partition(".")
            if section in recipe and name:
                recipe[section] = {**recipe[section], name: choice["value"]}
        found |= {"refused": True, "recipe": {**recipe, "budget": {"memory": ROOM}}}
    size, work = made.prediction.peak_bytes, made.prediction.flops
    if not LEAST_BYTES <= size <= MOST_BYTES or work > MOST_WORK:
        return {"left_out": f"{size / 1e6:.0f} MB of tensors, {work:.1e} FLOP in an update"}
    if made.seconds > FORESEEN:
        return {"left_out": f"would take {made.seconds:.0f} s on this machine"}
    return found


def main() -> None:
    """Plan the case of a file; what is to be run goes to standard output as a line of JSON."""
    print(json.dumps(planned(*json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()
