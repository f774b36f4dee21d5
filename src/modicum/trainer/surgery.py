"""Shapes change in the middle of a run: state is held in memory, all is built anew.

What a surgery is stands in `core.contracts.surgery`. Here the ranks agree on one, write it down as
a revision of the plan with the step after which it holds, and do it; and a process that resumes
takes up those that its checkpoint has seen. Later ones are forgotten like rows of later steps, as
the run will come to them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.core.clock import SURGERY
from modicum.core.contracts.parameters import trainable
from modicum.core.contracts.surgery import Surgery
from modicum.core.errors import InputError
from modicum.core.machine.memory import release
from modicum.planner import Plan
from modicum.recipe import differences
from modicum.trainer.accounts import start_meter, stop_meter
from modicum.trainer.assembly import assemble
from modicum.trainer.folder import PLAN
from modicum.trainer.held_state import hold, put_back
from modicum.trainer.session import Session
from modicum.trainer.warm_up import rehearse_again


def operate_if_asked(session: Session) -> None:
    """Do the surgery that a method asks for after the update that was just made, if one does.

    Every rank calls this, at the same step. Nothing is exchanged where no method may ask.

    Raises:
        InputError: ranks disagree, two methods ask at once, or state cannot be moved.
    """
    if (surgery := _agreed(session)) is not None:
        with session.clock(SURGERY), session.watched.marked():
            operate(session, surgery)


def _agreed(session: Session) -> Surgery | None:
    program = session.step_program
    if not program.hooks.may_change_shapes:
        return None
    program.flush()
    program.strategy.rest(session.model)
    asked = program.hooks.surgeries(session.step)
    if not session.ranks.max(len(asked))[0]:
        return None
    written = {"surgeries": [each.as_json() for each in asked]}
    session.ranks.same("surgery", written, lambda one, two: "; ".join(differences(one, two)))
    if len(asked) > 1:
        whys = "; ".join(each.why for each in asked)
        raise InputError("two methods change shapes at one step", field="surgery", value=whys)
    return asked[0]


def operate(session: Session, surgery: Surgery) -> None:
    """Change the run's shapes after update number `session.step`; every rank calls this.

    Step, data order, generators and schedules are what they were. The first rank writes the
    revision of the plan down before anything is taken down.

    Raises:
        InputError: state cannot be moved; nothing was changed.
    """
    trained = _movable(session, surgery)
    stop_meter(session)
    plan = session.plan.operated(surgery, session.step)
    shapes = session.plan.inputs.config.parameter_shapes()
    optimizer: Any = session.step_program.optimizer
    held = hold(session.registry, surgery, shapes, session.model, optimizer)
    row = plan.row() | {"surgery": {"step": session.step, **surgery.as_json()}}
    session.folder.append(PLAN, row)
    session.emit("phase", name="changing shapes", done=0, total=None)
    inputs = session.registry.views["inputs"]
    del optimizer
    _take_down(session)
    session.plan = plan
    session.built = assemble(plan, session.data, session.ranks, inputs, skip=trained)
    put_back(session.registry, held, session.step_program.optimizer, session.ranks)
    session.record.reshaped(plan.row())
    rehearse_again(session)
    start_meter(session)
    session.emit("surgery", step=session.step, revision=plan.revision, message=plan.why)


def _movable(session: Session, surgery: Surgery) -> set[str]:
    """The names of the trained parameters before and after, among which are all that change.

    Raises:
        InputError: one that changes is not trained.
    """
    trained = {name for name, _ in trainable(session.model)}
    own = dict(session.model.named_parameters())
    changed = {*surgery.rows, *(n for names in surgery.replaced(own).values() for n in names)}
    if frozen := sorted(changed - trained):
        problem = "is not trained: its rows come from the base model's files at each start"
        raise InputError(problem, field="surgery", value=frozen[0])
    return trained | surgery.weights


def _take_down(session: Session) -> None:
    """Let go of all that was built, so that its memory is free before the new one is taken."""
    session.step_program.hooks.close()
    del session.built
    release()


def with_surgery(plan: Plan, written: Mapping[str, Any], folder: str | Path) -> Plan:
    """The plan changed by a surgery as a row of plans in `folder` has it.

    Raises:
        InputError: it is none that a run writes, or none of this model.
    """
    try:
        return plan.reshaped(Surgery.from_json(written))
    except InputError as error:
        raise error.located(file=Path(folder) / PLAN) from None
