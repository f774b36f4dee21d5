"""What is looked at while a run trains: the validation metrics, and what the model writes."""

from __future__ import annotations

from modicum.core.clock import EVALUATING, SAMPLING
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
        _evaluate(session, data)


def _evaluate(session: Session, data: Rows[AnyBatch]) -> None:
    program, recipe = session.step_program, session.plan.recipe
    program.flush()
    with program.hooks.evaluation():
        result = evaluate(
            session.plan.task,
            session.model,
            data,
            rows=recipe.evaluation.rows,
            micro_batch_size=session.plan.prediction.choice.micro_batch_size,
            precision=recipe.training.precision,
            hooks=program.hooks,
            ranks=session.ranks,
            check=session.check,
        )
    if found := program.hooks.findings():
        result["findings"] = found
    program.strategy.rest(session.model)
    session.evaluated.add(session.step)
    # The seconds are each rank's own; what is decided by a row must be the same on all.
    row = session.ranks.broadcast({"step": session.step, **result})
    session.evaluations.append(row)
    session.folder.append(EVALUATIONS, row)
    session.record.evaluated(row)
    session.emit("evaluation", **row)


def write_samples(session: Session) -> None:
    """What the model writes now, as rows."""
    if session.step in session.sampled:
        return
    with session.clock(SAMPLING):
        _write_samples(session)


def _write_samples(session: Session) -> None:
    plan, program = session.plan, session.step_program
    program.flush()
    with program.hooks.evaluation():
        samples = plan.task.samples(plan.recipe, session.model, session.data, session.ranks)
    program.strategy.rest(session.model)
    session.sampled.add(session.step)
    rows = [{"step": session.step, **sample} for sample in samples]
    session.folder.append(SAMPLES, *rows)
    for row in rows:
        session.emit("sample", **row)
