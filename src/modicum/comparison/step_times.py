"""How long an update takes on each side: short runs, in turns, one at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from modicum.comparison.run_trials import RunTrials, recipe_digest
from modicum.core.errors import InputError
from modicum.core.files import disk_errors, read_json, write_json
from modicum.recipe import Recipe
from modicum.trainer.folder import METRICS, RunFolder

ROUNDS, STEPS, LEFT_OUT = 3, 8, 3
TIMES = "step-times.json"


def kept_step_seconds(
    folder: Path | None, recipes: Mapping[str, Recipe], tell: Callable[[str], None], ranks: int = 1
) -> dict[str, list[list[float]]]:
    """The seconds of single updates as a comparison measured them when it began, or now.

    So the same command gives its runs the same number of updates when it resumes.

    Args:
        folder: of the comparison; None: nothing is kept.
        ranks: of each run.

    Raises:
        InputError: a run did not finish, or the file is damaged; each with one message.
    """
    digests = {name: recipe_digest(each) for name, each in recipes.items()}
    asked = {"recipes": digests, "ranks": ranks}
    file = None if folder is None else folder / TIMES
    if file is not None and file.is_file():
        known = read_json(file)
        if not isinstance(known, dict) or not isinstance(known.get("seconds"), dict):
            raise InputError("holds no times of updates; remove it to measure them", file=file)
        found: dict[str, list[list[float]]] = known.pop("seconds")
        if known == asked:
            return found
    seconds = step_seconds(recipes, tell, ranks)
    # Those of another comparison stay: it is refused that this one takes its folder. Of a side
    # without times nothing is kept: its recipe has to change.
    timed = all(any(times) for times in seconds.values())
    if timed and file is not None and not file.exists():
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {**asked, "seconds": seconds})
    return seconds


def step_seconds(
    recipes: Mapping[str, Recipe],
    tell: Callable[[str], None] = lambda text: None,
    ranks: int = 1,
) -> dict[str, list[list[float]]]:
    """The seconds of single updates of each recipe, a list for each round.

    Each round has a short run of every side, so that a machine that is slow for a while is slow for
    all; the first updates of a run are left out, in which memory and kernels warm up.

    Raises:
        InputError: a run did not finish, with its message.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in recipes}
    with tempfile.TemporaryDirectory(prefix="modicum-times-") as folder:
        trial = RunTrials(Path(folder), recipes, ranks=ranks, rows=1)  # updates are what is timed
        short = {"training.steps": STEPS, "training.epochs": None, "training.tokens": None,
                 "training.warmup_steps": 0}  # fmt: skip
        for turn in range(ROUNDS):
            for name in recipes:
                tell(f"timing {name}, {turn + 1} of {ROUNDS}")
                outcome = trial(name, short, turn, "tune")
                if outcome.status not in ("finished", "diverged"):
                    problem = f"its updates could not be timed: {outcome.message}"
                    raise InputError(problem, value=name)
                rows = RunFolder(Path(outcome.folder)).rows(METRICS)
                found[name].append([row["seconds"] for row in rows[LEFT_OUT:]])
    return found
