"""The best evaluation so far, and whether a run has stopped improving.

Both are a function of the rows of evaluations alone, so that a run that resumes, and every rank,
comes to the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.planner import Plan
from modicum.recipe.sections import EvaluationSection
from modicum.tasks import Data
from modicum.tasks.metrics import BETTER
from modicum.trainer.session import Session


@dataclass(frozen=True)
class Best:
    """The best evaluation, None before the first, and how many came since the last that counted."""

    step: int | None = None
    value: float | None = None
    waited: int = 0


def best_of(
    rows: Iterable[Mapping[str, Any]],
    asked: EvaluationSection,
    better: Mapping[str, str] = BETTER,
) -> Best:
    """The best of evaluations in the order of their steps.

    Args:
        better: whether `lower` or `higher` values of a metric are better, where `asked` says auto.

    A value that is not finite is no better than any; step 0, before training, does not count. The
    first of equal values is the best.

    >>> rows = [{"step": step, "loss": loss} for step, loss in ((0, 1.0), (5, 3.0), (10, 3.5))]
    >>> best_of(rows, EvaluationSection())
    Best(step=5, value=3.0, waited=1)
    """
    kind = better.get(asked.metric) if asked.better == "auto" else asked.better
    sign = 1.0 if kind == "higher" else -1.0
    best, counted, waited = Best(), -math.inf, 0
    for row in rows:
        if row["step"] == 0:
            continue
        waited += 1
        value = row.get(asked.metric)
        if value is None or not math.isfinite(value):
            continue
        if best.value is None or sign * value > sign * best.value:
            best = Best(row["step"], value)
        if sign * value > counted + asked.min_delta:
            counted, waited = sign * value, 0
    return Best(best.step, best.value, waited)


def check_asked(plan: Plan, data: Data[Any], ranks: Ranks) -> None:
    """Refuse a best checkpoint, or an early stop, that nothing could decide, or a test of nothing.

    Raises:
        InputError: no validation or test data, no such metric, or one whose better values are not
            known; documents of the test are trained on.
    """
    asked = plan.recipe.evaluation
    if asked.test and data.test is None:
        raise InputError("needs test data, and there is none", field="evaluation.test", value=True)
    _check_apart(plan, data, ranks)
    if not asked.keep_best and asked.patience is None:
        return
    field = "evaluation.keep_best" if asked.keep_best else "evaluation.patience"
    if data.validation is None:
        raise InputError("needs validation data, and there is none", field=field)
    if asked.metric not in plan.task.metrics:
        raise InputError(
            "this task has no such metric",
            field="evaluation.metric",
            value=asked.metric,
            allowed=", ".join(plan.task.metrics),
            candidates=plan.task.metrics,
        )
    if asked.better == "auto" and asked.metric not in plan.task.better:
        raise InputError(
            f"say whether lower or higher values of {asked.metric} are better",
            field="evaluation.better",
            value="auto",
            allowed="lower, higher",
        )


def _check_apart(plan: Plan, data: Data[Any], ranks: Ranks) -> None:
    section, asked = plan.task.held_out(plan.recipe)
    path = asked.test_path
    if data.test is None or path is None:  # what is drawn is in one part, unless it stands twice
        return
    known = 0
    if ranks.first:
        trained = set(plan.task.digests(data.train))
        known = sum(digest in trained for digest in plan.task.digests(data.test))
    if known := ranks.broadcast(known):
        raise InputError(
            f"{known:,} of its {plan.task.examples} are trained on too, so it is no test; take "
            "them out of one of the two (`modicum data` counts them)",
            field=f"{section}.test_path",
            value=path,
        )


def has_stalled(session: Session) -> bool:
    """Whether the run stops here, as `patience` evaluations in a row were no better."""
    asked = session.plan.recipe.evaluation
    return asked.patience is not None and _best(session).waited >= asked.patience


def keep_if_best(session: Session) -> None:
    """Begin a checkpoint of the evaluation that was just made, if it is the best; it stays."""
    if session.plan.recipe.evaluation.keep_best and _best(session).step == session.step:
        session.store.hold(session.step)
        session.save()


def store_best(session: Session) -> None:
    """Let the best checkpoint of the run so far stay, also in this process."""
    if session.plan.recipe.evaluation.keep_best:
        session.store.hold(_best(session).step)


def note_best(session: Session) -> None:
    """Write the best evaluation, and an early stop, into the record; say that it came to one."""
    asked, steps = session.plan.recipe.evaluation, session.plan.steps
    if not asked.keep_best and asked.patience is None:
        return
    best = _best(session)
    found = {"step": best.step, "metric": asked.metric, "value": best.value}
    stopped = session.step if session.step < steps else None
    session.record.content |= {"best": found, "stopped_early": stopped}
    if stopped is not None:
        message = (
            f"after step {session.step} of {steps}, since {asked.metric} was no better in "
            f"{best.waited} evaluations in a row; the best was {best.value} after step {best.step}"
        )
        session.emit("stopping", step=session.step, message=message)


def take_best(session: Session) -> int:
    """Take up the best checkpoint's state where that is asked for: it is what is exported.

    Returns:
        The step whose weights the model has now.

    Raises:
        InputError: the checkpoint is damaged or gone.
    """
    best = _best(session)
    if not session.plan.recipe.evaluation.keep_best or best.step in (None, session.step):
        return session.step
    assert best.step is not None
    program = session.step_program
    program.flush()
    session.store.read(best.step).load(session.registry)
    program.strategy.rest(session.model)
    return best.step


def _best(session: Session) -> Best:
    plan = session.plan
    return best_of(session.evaluations, plan.recipe.evaluation, plan.task.better)
