"""What is tried before a process's first update: compiling, and whether the worst case fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from modicum.core.contracts.step import autocast
from modicum.core.errors import InputError, Restart
from modicum.core.layers.linear_forms import full_weight
from modicum.core.layers.meta import materialise
from modicum.core.machine.memory import limited
from modicum.core.machine.record import ProbeFailed, machine_record
from modicum.core.ranks.ranks import Ranks
from modicum.core.units import format_bytes
from modicum.data.rows import AnyBatch
from modicum.planner import Plan
from modicum.planner.choose import COMPILE, refused, with_headroom
from modicum.tasks import Data
from modicum.trainer.assembly import is_compiled
from modicum.trainer.build import wrapped
from modicum.trainer.compile_trial import WORTH_A_TRIAL_SECONDS, Decision, decide
from modicum.trainer.compiled_blocks import CompilingFails, eager_blocks
from modicum.trainer.rehearsal import first_that_fits, rehearse
from modicum.trainer.session import Session


def with_compile_decided(plan: Plan, data: Data[Any], ranks: Ranks) -> tuple[Plan, Decision | None]:
    """The plan with `training.compile` decided, and the decision where it was made now.

    A run that resumes keeps what it began with. A new one tries compiling on a block of a model of
    one layer, since its own may be sharded over ranks by the time it has memory.

    Raises:
        StopRequested: a signal came in the middle of it.
    """
    decided = any(row["field"] == COMPILE for row in plan.choices)
    if decided or plan.recipe.training.compile == "none":
        return plan, None
    if plan.recipe.training.compile == "auto" and (
        # It may measure for a minute, for which no rank is to wait in a call.
        why := ranks.broadcast(ranks.first_alone(lambda: _opposed(plan) if ranks.first else None))
    ):
        return plan.chosen(COMPILE, "none", why), Decision(False, why)
    choice, config = plan.prediction.choice, plan.inputs.config
    passes = len(config.block_prefixes()) * choice.micro_batches * plan.steps
    trial = plan.task.trial(config, data.train.worst(choice.micro_batch_size))
    decision = decide(
        _trial_model(plan, trial.config),
        plan.recipe,
        trial.batch,
        passes=passes,
        seconds=plan.seconds,
        ranks=ranks,
    )
    return _counted(plan.chosen(COMPILE, decision.value, decision.why), ranks), decision


def _counted(plan: Plan, ranks: Ranks) -> Plan:
    """The plan with what the compiler holds, where blocks are compiled; without it, where not."""
    counted = plan.recipe.training.compile == "blocks"
    if plan.device != "cpu" or is_compiled(plan) == counted:
        return plan
    # Which is not measured for this alone.
    more = int(ranks.broadcast(machine_record().compiled_bytes or 0))
    return replace(plan, process_base=plan.process_base + (-more if counted else more))


def _opposed(plan: Plan) -> str | None:
    """Why a run that may compile or not does not try: a method, or a budget, is against it."""
    if (refusal := refused(plan.recipe, ["run_compiles"])) is not None:
        return refusal.problem
    if (why := plan.task.why_eager(plan.recipe, plan.inputs)) is not None:
        return why
    held, budget = plan.process_bytes, plan.recipe.budget.memory
    if held is None or budget is None or plan.seconds < WORTH_A_TRIAL_SECONDS:
        return None
    try:
        more = machine_record().with_part("compiled").compiled_bytes or 0
    except ProbeFailed:
        return "what the compiler holds could not be measured, and there is a budget"
    if with_headroom(held, plan.process_base) + more <= budget:
        return None
    return f"what the compiler holds, {format_bytes(more)}, does not fit into the budget"


def _trial_model(plan: Plan, config: Any) -> Any:
    """A model whose one block is like those of the run, adapters and all."""
    try:
        model, adapter = wrapped(plan, config)
    except InputError:  # the recipe names layers that this model does not have
        model, adapter = wrapped(plan, config, adapted=False)
    materialise(model, torch.device(plan.device))
    model.initialise(plan.recipe.training.seed)
    if adapter is not None:
        # What a quantized layer represents is as good as any weight here.
        adapter.initialise(weights=lambda name: full_weight(model.get_submodule(name)).detach())
    return model


def rehearse_run(session: Session) -> None:
    """Run the worst micro-batch and the evaluation once; with less at a time where memory runs out.

    Compiled blocks meet every shape of the run here.

    Raises:
        DoesNotFit: not even one row at a time fits.
        Restart: memory ran out on some rank, or compiling failed, and the plan says less now.
        InputError: this run's blocks are compiled, and compiling fails now.
        StopRequested: a signal came in the middle of it.
    """
    with session.signals.at_once():
        rehearse_again(session)


def rehearse_again(session: Session) -> None:
    """The same in the middle of a run, where a signal waits until the state can be saved.

    Raises:
        DoesNotFit, Restart, InputError: as `rehearse_run`.
    """
    try:
        first_that_fits(
            lambda size: _rehearse(session, size),
            session.plan.prediction.choice.micro_batch_size,
            smaller=session.shrink,
            ranks=session.ranks,
        )
    except CompilingFails as error:
        if session.step:
            raise
        _give_up_compiling(session, error.reason)
        rehearse_again(session)


def _rehearse(session: Session, size: int) -> None:
    program, data, recipe = session.step_program, session.data, session.plan.recipe
    device = torch.device(session.plan.device)
    shapes = [data.train.worst(size)]
    if is_compiled(session.plan):
        shapes = list(data.train.shapes(_rows(recipe.training.batch_size, session.ranks, size)))
    row = session.plan.task.row(recipe)

    def run_step(batch: AnyBatch) -> None:
        program.rehearse(batch.to(device), size * row.tokens)

    def run_evaluation(batch: AnyBatch) -> None:
        # In fp32 a run in bf16 would take more here than any of its evaluations.
        precision = autocast(device, recipe.training.precision)
        with precision, program.hooks.forward_context("evaluate"):
            session.plan.task.evaluate(session.model, batch.to(device))
        program.strategy.rest(session.model)

    ledger = session.plan.prediction.ledger
    # Room for one more of the largest tensors makes up for gaps between those of a step, where
    # memory can run out: else it would only make the process larger than the run needs.
    spare = 0
    if device.type != "cpu" or limited():
        spare = session.plan.task.largest_bytes(session.config, replace(row, sequences=size))
    held = any(True for _ in program.state())
    rehearse(
        session.model,
        run_step=run_step,
        run_evaluation=run_evaluation,
        steps=shapes,
        evaluation=shapes[0] if data.validation is not None or recipe.evaluation.test else None,
        accumulates=session.plan.prediction.choice.micro_batches > 1,
        ballast_bytes=spare + (0 if held else ledger.bytes("optimizer")),
        device=device,
    )


def _rows(batch_size: int, ranks: Ranks, size: int) -> set[int]:
    """The numbers of rows that this run's micro-batches have, on any rank."""
    shares = {batch_size // ranks.size, -(-batch_size // ranks.size)}
    found = {size for share in shares if share >= size} | {share % size for share in shares}
    if len(shares) > 1:
        found.add(1)  # a rank that has no rows left
    return found - {0}


def _give_up_compiling(session: Session, reason: str) -> None:
    """Continue eagerly; nothing was computed with compiled blocks yet."""
    why = f"compiling does not work here: {reason}"
    session.revise(session.plan.chosen(COMPILE, "none", why))
    session.emit("compile", message=f"blocks run eagerly: {why}")
    if not session.ranks.alone:
        raise Restart(f"compiling failed on {session.ranks.name}; all begin anew without it")
    eager_blocks(session.model)
