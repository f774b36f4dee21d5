"""A comparison that a protocol carries out: it asks for trials, and each is a run folder.

`fair_optim` tunes every side by coordinate descent at several amounts of data, and judges in data:
how much of it the reference would need to come to another side's loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from modicum.comparison.comparing import Settled, made_by, settled
from modicum.comparison.identity import as_json, refuse_other
from modicum.comparison.outcome import Outcome, Trial
from modicum.comparison.ray_executor import RayExecutor
from modicum.comparison.records import Job
from modicum.comparison.run_trials import RECIPE, RunTrials, recipe_digest
from modicum.comparison.shared_runs import SharedRuns
from modicum.comparison.spaces import refuse_unknown, space_of
from modicum.comparison.study_file import is_damaged
from modicum.comparison.workers import run_jobs
from modicum.core.errors import InputError, Interrupted
from modicum.core.files import read_json, write_json
from modicum.core.folder_lock import locked_folder
from modicum.core.progress import Listener
from modicum.optim.protocol import ProtocolContext, ProtocolRuntime, protocol_of
from modicum.optim.protocol_trials import ProtocolRegime, ProtocolTrial, TrialResult
from modicum.optim.search_grid import SearchGrid
from modicum.recipe import Recipe
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


def compare_by_protocol(
    recipes: str | Sequence[str],
    out: str | Path,
    protocol: str = "fair_optim",
    *,
    budget: str,
    vary: str | None = None,
    overrides: Sequence[str] = (),
    trials: int = 12,
    seeds: int = 5,
    tune: Sequence[str] = (),
    baseline: str | None = None,
    parallel: int = 1,
    ranks: int = 1,
    on: Literal["ray"] | None = None,
    fresh: bool = False,
    progress: Listener = lambda event: None,
) -> dict[str, Any]:
    """By how much data methods or recipes differ, as `modicum compare --protocol` finds it.

    Whatever is stopped or killed, the same call resumes.

    Args:
        protocol: who asks for trials.
        budget: `tokens=500k`: each run has a half to four times as many.
        trials: the most settings that a side tries at one amount of data.
        tune: fields that are tuned; empty: all of each side's search table.
        baseline: the side whose curve speed-ups are measured on; None: the first.
        recipes, out, vary, overrides, seeds, parallel, ranks, on, fresh, progress: see `compare`.

    Returns:
        The report as JSON values, as in `protocol.json`.

    Raises:
        InputError, DoesNotFit, Interrupted: as of `compare` and `run_protocol`.

    >>> import modicum
    >>> found = modicum.compare_by_protocol(
    ...     "demo-pretrain", "compare/data", vary="optimizer=adamw,muon", budget="tokens=500k"
    ... )                                                                      # doctest: +SKIP
    >>> found["speedups"][0]["speedup"]["interval"]                            # doctest: +SKIP
    [1.1, 1.3]
    """
    named = [recipes] if isinstance(recipes, str) else list(recipes)
    protocol_of(protocol)
    asked = settled(
        named, vary=vary, budget=budget, overrides=overrides, trials=trials, seeds=seeds,
        ranks=ranks, folder=Path(out), tell=lambda text: progress({"event": "phase", "name": text}),
    )  # fmt: skip
    return run_protocol(
        asked, out, protocol, tune=tuple(tune), baseline=baseline, parallel=parallel, ranks=ranks,
        on=on, fresh=fresh, progress=progress,
    )  # fmt: skip


def run_protocol(
    asked: Settled,
    out: str | Path,
    name: str,
    *,
    tune: tuple[str, ...] = (),
    baseline: str | None = None,
    parallel: int = 1,
    ranks: int = 1,
    on: Literal["ray"] | None = None,
    fresh: bool = False,
    progress: Listener = lambda event: None,
    train: Trial | None = None,
) -> dict[str, Any]:
    """Carry out a protocol on settled sides; what is left of it, where the folder has some.

    Every run has a folder, so one that has finished is read and not made again.

    Args:
        asked: sides with a budget in tokens, of which each run has a half to four times as many;
            `trials` are the most settings that a side tries in a regime, `seeds` those that judge.
        name: of the protocol.
        tune: fields that are tuned; empty: all of each side's search table.
        baseline: the side whose curve speed-ups are measured on; None: the first.
        parallel, ranks, on: as of `compare`.
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
    refuse_unknown(sides, tune)
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
    runs = RunTrials(folder, recipes, parallel, ranks)
    given = {side: recipe.plain() for side, recipe in recipes.items()}
    identity = as_json(
        {**context.to_json(), "protocol": value.model_dump(), "recipes": given, "ranks": ranks,
         "made_by": made_by(runs)}
    )  # fmt: skip
    with locked_folder(folder, "comparison"), ExitStack() as stack:
        file = folder / STUDY
        if file.exists() and not is_damaged(file):
            refuse_other(read_json(file).get("identity", {}), identity, file)
        write_json(file, {"identity": identity})
        executor = stack.enter_context(RayExecutor(runs.cores)) if on == "ray" else None
        trial = train or SharedRuns(runs, fresh=fresh)
        trials = ProtocolTrials(recipes, trial, progress, parallel, executor)
        try:
            report = trials.carry_out(value.bind(context))
        except KeyboardInterrupt:
            raise Interrupted("stopped between trials; the same command resumes") from None
        write_json(folder / RESULT, {"identity": identity, **report})
    return report


@dataclass
class ProtocolTrials:
    """Runs what a protocol asks for, several at once where wanted; it hears in its own order.

    Args:
        recipes: of each side.
    """

    recipes: Mapping[str, Recipe]
    trial: Trial
    progress: Listener
    parallel: int = 1
    executor: Executor | None = None
    _ended: dict[str, tuple[ProtocolTrial, Outcome]] = field(default_factory=dict)

    def carry_out(self, runtime: ProtocolRuntime) -> dict[str, Any]:
        """The protocol's report, how many trials were taken, and which have no loss and why."""
        digests = {side: recipe_digest(recipe) for side, recipe in self.recipes.items()}
        while wave := runtime.ask():
            jobs = {}
            for trial in wave:
                settings = {**trial.settings, "training.tokens": trial.regime.tokens,
                            RECIPE: digests[trial.side]}  # fmt: skip
                job = Job(trial.side, settings, trial.seed, trial.part)
                jobs[job.name] = (job, trial)
            self._run(jobs)
            for name, (_, trial) in jobs.items():
                result = _result(self._ended[name][1])
                runtime.tell(trial, result.loss, curve=result.curve, metrics=result.metrics)
        report: dict[str, Any] = runtime.report().to_json()
        ended = self._ended.values()
        report["taken"] = sum(outcome.taken for _, outcome in ended)
        report["failed"] = [
            {**_shown(trial), "status": outcome.status, "message": outcome.message}
            for trial, outcome in ended
            if outcome.score is None
        ]
        return report

    def _run(self, jobs: Mapping[str, tuple[Job, ProtocolTrial]]) -> None:
        """Run a wave.

        Raises:
            InputError: a run ended by no fault of its settings, so that its loss is not known.
        """

        def done(job: Job, outcome: Outcome) -> None:
            trial = jobs[job.name][1]
            self.progress({"event": "trial", **_shown(trial), "known": False,
                           "outcome": outcome.to_json()})  # fmt: skip
            if outcome.status == "crashed":
                problem = f"a run ended without a loss: {outcome.message}"
                raise InputError(f"{problem}; the same command tries it again",
                                 file=outcome.folder or None)  # fmt: skip
            self._ended[job.name] = trial, outcome

        asked: Sequence[Job] = [job for job, _ in jobs.values()]
        run_jobs(self.trial, asked, done, parallel=self.parallel, executor=self.executor)


def _shown(trial: ProtocolTrial) -> dict[str, Any]:
    """A trial for people and for the report."""
    return {"side": trial.side, "settings": dict(trial.settings), "seed": trial.seed,
            "part": trial.part, "ratio": trial.regime.ratio}  # fmt: skip


def _result(outcome: Outcome) -> TrialResult:
    """An outcome as a protocol takes it: settings that do not run are the worst there are."""
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
