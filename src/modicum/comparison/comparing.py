"""`modicum.compare`: recipes or methods, a budget that is the same for all, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from modicum import recipe_yaml
from modicum.comparison.begun import BegunComparison
from modicum.comparison.budgets import SharedBudget, Sized, spent_of, steps_for
from modicum.comparison.comparison import Comparison
from modicum.comparison.ray_executor import RayExecutor
from modicum.comparison.run_trials import RECIPE, RunTrials, recipe_digest
from modicum.comparison.shared_runs import SharedRuns
from modicum.comparison.side_sizes import NO_LENGTH, small_enough, with_settings, within
from modicum.comparison.sides import RecipeSide, planned, sides_of
from modicum.comparison.space import Side
from modicum.comparison.spaces import TunedRange, refuse_unknown, space_of
from modicum.comparison.step_times import kept_step_seconds
from modicum.comparison.study import Study
from modicum.comparison.study_file import STUDY
from modicum.comparison.tested_data import have_test, refuse_trained_tests
from modicum.comparison.tuning import SearchSampler
from modicum.core.errors import DoesNotFit, InputError
from modicum.core.files import write_text
from modicum.core.machine import versions
from modicum.core.progress import Listener
from modicum.trainer.rank_agreement import code


@dataclass(frozen=True)
class Settled:
    """What a comparison will do, before it does it.

    Args:
        sides: with their plans, or why they do not take part.
        budget: None: each recipe's own length.
        trials, seeds: runs of each side that tune, and that judge.
        fixed: of each side, what the budget has settled.
        references: sides that have no size, next to a budget in bytes.
        unequal: of sides that are more than 3 % away from a budget in bytes why, in a sentence.
    """

    sides: tuple[RecipeSide, ...]
    budget: SharedBudget | None
    trials: int
    seeds: int
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    unequal: Mapping[str, str] = field(default_factory=dict)

    @property
    def taking_part(self) -> list[RecipeSide]:
        """The sides that are not refused."""
        return [side for side in self.sides if side.refused is None]

    def row(self) -> dict[str, Any]:
        """What `--dry-run` shows: runs, hours and bytes by forecast, and who is refused."""
        sides: list[dict[str, Any]] = []
        for side in self.sides:
            if side.plan is None:
                sides.append({"side": side.name, "refused": side.refused})
                continue
            runs = self.trials + self.seeds
            spent = {kind: spent_of(side.plan, kind) for kind in ("peak", "state", "trained")}
            sides.append(
                {"side": side.name, "refused": None, "runs": runs, "steps": side.plan.steps,
                 "seconds": runs * side.plan.seconds, "bytes": spent,
                 "fixed": dict(self.fixed.get(side.name, {})),
                 "reference": side.name in self.references,
                 "unequal": self.unequal.get(side.name, "")}
            )  # fmt: skip
        known = [row for row in sides if row["refused"] is None]
        return {
            "budget": None if self.budget is None else self.budget.said,
            "sides": sides,
            "runs": sum(row["runs"] for row in known),
            "hours": sum(row["seconds"] for row in known) / 3600,
        }


def settled(
    recipes: Sequence[str],
    *,
    vary: str | None = None,
    budget: str | None = None,
    overrides: Sequence[str] = (),
    trials: int = 12,
    seeds: int = 5,
    ranks: int = 1,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Settled:
    """Plan every side, and make the budget settings of each.

    Args:
        folder: of the comparison, which keeps how long updates took; None: it is not begun.

    Raises:
        InputError: fewer than two sides, or something in a recipe, the sides or the budget is
            wrong.
        DoesNotFit: fewer than two sides fit.
    """
    limit = None if budget is None else SharedBudget.parse(budget)
    sides, fixed, found = [], {}, dict[str, Sized]()
    begun = BegunComparison.of(folder)
    written = sides_of(recipes, vary, overrides)
    for side in written:
        stays = f"{side.name} stays out, as when this comparison began"
        tell(stays if side.name in begun.refused else f"planning {side.name}")
        side, size = small_enough(planned(begun.side(side), ranks), ranks)
        own, side, of_bytes = within(side, limit, ranks, begun)
        own = {**size, **own}
        sides.append(side)
        fixed[side.name] = own
        found |= {} if of_bytes is None else {side.name: of_bytes}
    if limit is not None and limit.kind == "seconds":
        have_test(sides)  # what is wrong is said before updates are timed
        sides, fixed = _timed(sides, limit, ranks, folder, tell)
    # Of a refused side the recipe as it is written: a size follows from the memory that is free.
    sides = [
        side if side.refused is None else replace(side, recipe=own.recipe)
        for side, own in zip(sides, written, strict=True)
    ]
    references = tuple(name for name, each in found.items() if each.reference)
    unequal = {name: each.unequal for name, each in found.items() if each.unequal}
    asked = Settled(tuple(sides), limit, trials, seeds, fixed, references, unequal)
    _refuse_pointless(asked, budget)
    return asked


def _refuse_pointless(found: Settled, budget: str | None) -> None:
    """Refuse a comparison of fewer than two sides, or whose budget decides nothing.

    Raises:
        DoesNotFit: because sides are too large.
        InputError: for other reasons.
    """
    problem = ""
    if len(found.taking_part) < 2:
        problem, budget = "fewer than two sides can take part. ", None
    elif len(found.references) == len(found.taking_part):
        problem = "no side has a size that could be raised to it; take tokens or seconds. "
    if not problem:
        return
    why: dict[str, list[str]] = {}
    for side in found.sides:
        if side.refused:
            why.setdefault(side.refused, []).append(side.name)
    problem += "; ".join(f"{', '.join(names)}: {reason}" for reason, names in why.items())
    problem = problem.removesuffix(". ")
    if not all(side.fits for side in found.sides):
        raise DoesNotFit(problem)
    if budget is not None:
        raise InputError(problem, field="--budget", value=budget)
    raise InputError(problem)


def _timed(
    sides: Sequence[RecipeSide],
    limit: SharedBudget,
    ranks: int,
    folder: Path | None,
    tell: Callable[[str], None],
) -> tuple[list[RecipeSide], dict[str, dict[str, Any]]]:
    """As many updates for each side as the seconds are enough for, by updates that are timed."""
    recipes = {side.name: side.recipe for side in sides if side.plan is not None and side.recipe}
    seconds = kept_step_seconds(folder, recipes, tell, ranks)
    timed, fixed = [], {}
    for side in sides:
        own: dict[str, Any] = {}
        if side.plan is not None and side.recipe is not None and side.name in seconds:
            part = bool(side.recipe.training.warmup_fraction)  # of whatever length the run has
            try:
                steps = steps_for(limit, seconds[side.name], 0 if part else side.plan.length.warmup)
            except InputError as error:
                problem = f"{side.name}: {error.problem}"
                raise InputError(problem, field=error.field, value=error.value) from None
            own = {**NO_LENGTH, "training.tokens": None, "training.steps": steps}
            side = with_settings(side, own, ranks)
        timed.append(side)
        fixed[side.name] = own
    return timed, fixed


def compare(
    recipes: str | Sequence[str],
    out: str | Path,
    *,
    vary: str | None = None,
    budget: str | None = None,
    overrides: Sequence[str] = (),
    trials: int = 12,
    seeds: int = 5,
    sampler: SearchSampler = "tpe",
    tune: Sequence[str] = (),
    baseline: str | None = None,
    parallel: int = 1,
    ranks: int = 1,
    on: Literal["ray"] | None = None,
    fresh: bool = False,
    retry: bool = False,
    progress: Listener = lambda event: None,
) -> Comparison:
    """Which of several methods or recipes is better on their data, by how much, at the same cost.

    Every side is tuned with as many trials, its settings are frozen, and fresh seeds judge it.
    Whatever is stopped or killed, the same call resumes, and ends with the same table.

    Args:
        recipes: of the sides; or one, and `vary`.
        out: the folder of the comparison.
        vary: `SECTION=METHOD,METHOD,...`: the one recipe with each of these methods.
        budget: that every run keeps: `tokens=500k`, `seconds=300`, `state=8MB`, `peak=2GB` or
            `trained=100kB`; None: what each recipe says.
        overrides: settings of all sides, `training.batch_size=8`.
        trials: of tuning on each side; may grow.
        seeds: that judge; may grow. One gives no interval.
        sampler: which settings are tried.
        tune: fields to tune, by their names in the search tables; empty: the first of each.
        baseline: the side that others are compared with; None: the best one.
        parallel: runs at once, which share the cores; one where seconds are the budget.
        ranks: of each run.
        on: `ray`: trials run on a cluster of Ray, all machines of which see the folder.
        fresh: train also what another comparison has trained alike, whose losses and bytes would be
            taken; where seconds are the budget, nothing is.
        retry: run trials again that crashed, ran out of memory or were refused.
        progress: is called with events.

    Raises:
        InputError: recipes, sides, budget or folder are wrong; each with one message.
        DoesNotFit: fewer than two sides fit into memory or into the budget.
        Interrupted: it was stopped; the same call resumes.

    >>> import modicum
    >>> found = modicum.compare("demo-adapt", "compare/adapters", vary="adapter=lora,pissa",
    ...     budget="tokens=100k", trials=3, seeds=3)                           # doctest: +SKIP
    >>> found.winner                                                           # doctest: +SKIP
    'lora'
    """
    named = [recipes] if isinstance(recipes, str) else list(recipes)

    def tell(text: str) -> None:
        progress({"event": "phase", "name": text})

    asked = settled(
        named, vary=vary, budget=budget, overrides=overrides, trials=trials, seeds=seeds,
        ranks=ranks, folder=Path(out), tell=tell,
    )  # fmt: skip
    return run_settled(
        asked, out, sampler=sampler, tune=tune, baseline=baseline, parallel=parallel, ranks=ranks,
        on=on, fresh=fresh, retry=retry, progress=progress,
    )  # fmt: skip


def tuned_ranges(asked: Settled, tune: Sequence[str] = ()) -> dict[str, dict[str, TunedRange]]:
    """Of each side that takes part, what is tuned and over which range.

    Raises:
        InputError: a field that no search table has, or one that the budget has settled.
    """
    refuse_unknown(asked.taking_part, tuple(tune))
    found = {side.name: space_of(side, asked.trials, tuple(tune)) for side in asked.taking_part}
    for name, ranges in found.items():
        twice = sorted(set(ranges) & set(asked.fixed.get(name, ())))
        if twice and tune and asked.budget is not None:
            problem = f"the budget, {asked.budget.said}, settles this for {name}: it is not tuned"
            raise InputError(problem, field="--tune", value=twice[0].rpartition(".")[2])
        for path in twice:
            del ranges[path]
    return found


def run_settled(
    asked: Settled,
    out: str | Path,
    *,
    sampler: SearchSampler = "tpe",
    tune: Sequence[str] = (),
    baseline: str | None = None,
    parallel: int = 1,
    ranks: int = 1,
    on: Literal["ray"] | None = None,
    fresh: bool = False,
    retry: bool = False,
    progress: Listener = lambda event: None,
) -> Comparison:
    """Tune and judge sides that are settled; what is left of it, where the folder has some.

    Raises:
        InputError, Interrupted: as `compare`.
    """
    timed = asked.budget is not None and asked.budget.kind == "seconds"
    if timed and (parallel > 1 or on is not None):
        problem = "runs that share the cores are slower, and seconds are the budget; one at a time"
        raise InputError(problem, field="--parallel", value=parallel, allowed="1")
    folder, recipes, sides, spaces = Path(out), {}, [], tuned_ranges(asked, tune)
    for side in asked.sides:
        if side.refused is not None or side.recipe is None:
            sides.append(Side(side.name, refusal=side.refused or "it has no recipe"))
            continue
        recipes[side.name] = side.recipe.anchored()
        space = spaces[side.name]
        sides.append(Side(side.name, space, {RECIPE: recipe_digest(recipes[side.name])}))
    refused = {
        side.name: side.recipe.anchored().plain()
        for side in asked.sides
        if side.name not in recipes and side.recipe is not None
    }
    first = next(iter(recipes.values()))
    tested = have_test(asked.taking_part)
    runs = RunTrials(folder, recipes, parallel, ranks, tested=tested)
    trial = SharedRuns(runs, fresh=fresh or timed)
    if tested and not (folder / STUDY).exists():
        refuse_trained_tests([side.plan for side in asked.taking_part if side.plan is not None])
    given = {
        "recipes": {name: recipe.plain() for name, recipe in recipes.items()},
        "refused": {"recipes": refused},
        "budget": None if asked.budget is None else asked.budget.said,
        "references": list(asked.references),
        "unequal": dict(asked.unequal),
        "ranks": ranks,
        "made_by": made_by(runs),
    }
    with ExitStack() as stack:
        executor = stack.enter_context(RayExecutor(runs.cores)) if on == "ray" else None
        study = Study(
            folder, sides, trial, trials=asked.trials, seeds=asked.seeds, sampler=sampler,
            seed=first.training.seed, baseline=baseline, parallel=parallel, executor=executor,
            given=given,
        )  # fmt: skip
        found = study.run(progress, retry=retry)
    runs.data.remove()
    _write_best(found, runs, folder)
    return found


def made_by(runs: RunTrials) -> dict[str, str]:
    """What computes, next to recipes: other versions, sources or threads give other numbers."""
    return {**versions(), "code": code(), "threads": runs.threads}


def best_side(found: Comparison) -> str | None:
    """The side that is shown to be better, else the one of the least mean; None where none has."""
    means = {one.side: one.mean for one in found.judgement.standings if one.mean is not None}
    return found.winner or min(means, key=lambda side: means[side], default=None)


def _write_best(found: Comparison, trial: RunTrials, folder: Path) -> None:
    """`best.yaml`: the recipe of the best side with its settings, ready to run."""
    side = best_side(found)
    if side is None:
        return
    frozen = found.side(side).frozen
    assert frozen is not None
    write_text(folder / "best.yaml", recipe_yaml.dump(trial.settled(side, frozen)))
