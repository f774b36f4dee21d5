"""What is looked at while a run trains: metrics on what is held out, and what the model writes."""

from __future__ import annotations

from typing import Any, Literal

from modicum.core.clock import EVALUATING, SAMPLING
from modicum.core.plain_values import finite
from modicum.data.rows import AnyBatch, Rows
from modicum.trainer.evaluate import evaluate
from modicum.trainer.folder import EVALUATIONS, SAMPLES
from modicum.trainer.session import Session


def evaluate_now(session: Session) -> None:
    """Validation loss now, as a row."""
    data = session.data.validation
    if data is None or session.step in session.evaluated:
        return
    with session.clock(EVALUATING):
        result = _measured(session, data, session.plan.recipe.evaluation.rows)
    session.evaluated.add(session.step)
    row = {"step": session.step, **result}
    session.evaluations.append(row)
    session.folder.append(EVALUATIONS, row)
    session.record.evaluated(row)
    session.emit("evaluation", **row)


def evaluate_test(session: Session, step: int) -> None:
    """All rows of the test into the record, where the recipe asks for that.

    Args:
        step: whose weights the model has.
    """
    data = session.data.test
    if data is None or not session.plan.recipe.evaluation.test:
        return
    with session.clock(EVALUATING):
        result = _measured(session, data, "all")
    row = {"step": step, **result, "rows": len(data)}
    session.record.tested(row)
    session.emit("test", **row)


def _measured(session: Session, data: Rows[AnyBatch], rows: int | Literal["all"]) -> dict[str, Any]:
    """The metrics of the model as it is, over the first rows; the same on all ranks.

    One that is not finite is None.
    """
    program, recipe = session.step_program, session.plan.recipe
    program.flush()
    with session.watched.marked(), program.hooks.evaluation():
        result = evaluate(
            session.plan.task,
            session.model,
            data,
            rows=rows,
            micro_batch_size=session.plan.prediction.choice.micro_batch_size,
            precision=recipe.training.precision,
            hooks=program.hooks,
            ranks=session.ranks,
            check=session.check,
        )
    if found := program.hooks.findings():
        result["findings"] = found
    program.strategy.rest(session.model)
    # The seconds are each rank's own; what is decided by a row must be the same on all.
    agreed: dict[str, Any] = session.ranks.broadcast(finite(result))
    return agreed


def write_samples(session: Session) -> None:
    """What the model writes now, as rows."""
    if session.step in session.sampled:
        return
    with session.clock(SAMPLING):
        _write_samples(session)


def _write_samples(session: Session) -> None:
    plan, program = session.plan, session.step_program
    program.flush()
    with session.watched.marked(), program.hooks.evaluation():
        samples = plan.task.samples(plan.recipe, session.model, session.data, session.ranks)
    program.strategy.rest(session.model)
    session.sampled.add(session.step)
    rows = [{"step": session.step, **sample} for sample in samples]
    session.folder.append(SAMPLES, *rows)
    for row in rows:
        session.emit("sample", **row)
