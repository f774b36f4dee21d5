"""A comparison that a protocol carries out: it asks for trials, and each is a run folder.

`fair_optim` tunes every side by coordinate descent at several amounts of data, and judges in data:
how much of it the reference would need to come to another side's loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modicum.comparison.comparing import Settled
from modicum.comparison.identity import as_json, refuse_other
from modicum.comparison.outcome import Outcome, trial_name
from modicum.comparison.run_trials import RECIPE, RunTrials, recipe_digest
from modicum.comparison.shared_runs import SharedRuns
from modicum.comparison.spaces import space_of
from modicum.core.errors import InputError, Interrupted
from modicum.core.files import read_json, write_json
from modicum.core.folder_lock import locked_folder
from modicum.core.progress import Listener
from modicum.optim.protocol import ProtocolContext, carry_out, protocol_of
from modicum.optim.protocol_trials import ProtocolRegime, ProtocolTrial, TrialResult
from modicum.optim.search_grid import SearchGrid
from modicum.trainer.folder import RunFolder

RATIOS = (0.5, 1.0, 2.0, 4.0)  # of the budget's tokens; three unknowns need four of them
STUDY, RESULT = "study.json", "protocol.json"
_VALUES = 5  # of each grid, to begin with
_FIELDS = 1 << 16  # trials, for `space_of`: a protocol tunes all fields of a table
_POINTS = 100  # of a training curve


def foreseen(asked: Settled) -> dict[str, Any]:
    """What `--dry-run` shows: at the most so many runs and hours, over all amounts of data.

    Raises:
        InputError: no budget in tokens.
    """
    _tokens_of(asked)
    row = asked.row()
    each = asked.trials + 2 * asked.seeds  # seeds judge the best settings, and the default
    known = [side for side in row["sides"] if side["refused"] is None]
    for side in known:
        side["seconds"] *= sum(RATIOS) * each / side["runs"]
        side["runs"] = len(RATIOS) * each
    runs, seconds = (sum(side[name] for side in known) for name in ("runs", "seconds"))
    return {**row, "runs": runs, "hours": seconds / 3600, "at_most": True}


def _tokens_of(asked: Settled) -> float:
    if asked.budget is None or asked.budget.kind != "tokens":
        problem = "a protocol needs the tokens of a run"
        raise InputError(problem, field="--budget", value=None, allowed="tokens=500k")
    return asked.budget.amount


def run_protocol(
    asked: Settled,
    out: str | Path,
    name: str,
    *,
    tune: tuple[str, ...] = (),
    baseline: str | None = None,
    ranks: int = 1,
    fresh: bool = False,
    progress: Listener = lambda event: None,
    train: Callable[[str, Mapping[str, Any], int, Any], Outcome] | None = None,
) -> dict[str, Any]:
    """Carry out a protocol on settled sides; what is left of it, where the folder has some.

    Every run has a folder, so one that has finished is read and not made again.

    Args:
        asked: sides with a budget in tokens, of which each run has a half to four times as many;
            `trials` are the most settings that a side tries in a regime, `seeds` those that judge.
        name: of the protocol.
        tune: fields that are tuned; empty: all of each side's search table.
        baseline: the side whose curve speed-ups are measured on; None: the first.
        fresh: make also runs that another comparison has made alike.
        train: what makes a trial, instead of a run folder.

    Returns:
        The report as JSON values, as in `protocol.json`.

    Raises:
        InputError: no such protocol, no budget in tokens, another comparison in the folder, or a
            run that ended by no fault of its settings.
        Interrupted: it was stopped; the same call resumes.
    """
    budget = _tokens_of(asked)
    value = protocol_of(name, {"seeds": asked.seeds, "most_settings": asked.trials})
    folder, sides = Path(out), asked.taking_part
    recipes = {side.name: side.recipe.anchored() for side in sides if side.recipe is not None}
    first = sides[0]
    assert first.plan is not None
    parameters = first.plan.prediction.trainable
    context = ProtocolContext(
        {
            side.name: {
                path: SearchGrid.of(known, _VALUES)
                for path, known in space_of(side, _FIELDS, tune).items()
            }
            for side in sides
        },
        [ProtocolRegime(parameters, ratio, budget / parameters) for ratio in RATIOS],
        baseline or first.name,
        recipes[first.name].training.seed,
    )
    digests = {side: recipe_digest(recipe) for side, recipe in recipes.items()}
    given = {side: recipe.plain() for side, recipe in recipes.items()}
    identity = as_json({**context.to_json(), "protocol": value.model_dump(), "recipes": given})
    taken: set[str] = set()
    runs = train or SharedRuns(RunTrials(folder, recipes, ranks=ranks), fresh=fresh)

    def result(trial: ProtocolTrial) -> TrialResult:
        settings = {
            **trial.settings, "training.tokens": trial.regime.tokens, RECIPE: digests[trial.side],
        }  # fmt: skip
        outcome = runs(trial.side, settings, trial.seed, trial.part)
        told = {"event": "trial", "side": trial.side, "settings": dict(trial.settings),
                "seed": trial.seed, "part": trial.part, "ratio": trial.regime.ratio,
                "known": False, "outcome": outcome.to_json()}  # fmt: skip
        progress(told)
        if outcome.taken:
            taken.add(trial_name(trial.side, settings, trial.seed, trial.part))
        return _result(outcome)

    with locked_folder(folder, "comparison"):
        file = folder / STUDY
        if file.exists():
            refuse_other(read_json(file).get("identity", {}), identity, file)
        write_json(file, {"identity": identity})
        try:
            report: dict[str, Any] = carry_out(value.bind(context), result).to_json()
        except KeyboardInterrupt:
            raise Interrupted("stopped between trials; the same command resumes") from None
        report["taken"] = len(taken)
        write_json(folder / RESULT, {"identity": identity, **report})
    return report


def _result(outcome: Outcome) -> TrialResult:
    """An outcome as a protocol takes it.

    Raises:
        InputError: the run ended by no fault of its settings, so that its loss is not known.
    """
    if outcome.status == "crashed":
        problem = f"a run ended without a loss: {outcome.message}; the same command tries it again"
        raise InputError(problem, file=outcome.folder or None)
    score = outcome.score
    figures: dict[str, float] = {f"{kind}_bytes": size for kind, size in outcome.bytes.items()}
    if outcome.seconds is not None:
        figures["seconds"] = outcome.seconds
    return TrialResult(math.inf if score is None else score, _curve(outcome), figures)


def _curve(outcome: Outcome) -> list[tuple[float, float]]:
    """Shares of training and losses, at most a hundred."""
    if not outcome.folder:
        return []
    rows = RunFolder(Path(outcome.folder)).curve()
    stride = max(1, len(rows) // _POINTS)
    kept = [(n, row["loss"]) for n, row in enumerate(rows, 1) if n % stride == 0 or n == len(rows)]
    return [(n / len(rows), loss) for n, loss in kept if loss is not None]
