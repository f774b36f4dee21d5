"""What a run measures of itself: its peak of tensor bytes, shares of activations, its speed."""

from __future__ import annotations

from dataclasses import asdict

from modicum.core.contracts.run_hooks import RunHook
from modicum.core.layers.saved_tensors import Shares
from modicum.core.machine.memory import bytes_by_kind, release
from modicum.planner.choose import MEMORY
from modicum.trainer.folder import PLAN
from modicum.trainer.session import Session

# The meter of tensor bytes covers this many updates: by then every tensor that a step needs has
# been there once.
METERED_STEPS = 2


def start_meter(session: Session) -> None:
    """Start the meter, for a few updates, and note what persists while gradients are there."""
    session.meter.start(sum(_persisting(session).values()))
    session.step_program.hooks.add("meter", _Metering(session))
    session.metered_until = session.step + METERED_STEPS


def stop_meter(session: Session) -> None:
    """Record the meter's peak, if it is on and an update was done."""
    if session.meter.running:
        session.record.metered(round(session.ranks.max(session.meter.stop())[0]))
        release()  # what the meter's events leave behind between the tensors' pages


def revise_by_shares(session: Session) -> None:
    """A revision with what a policy on saved activations really left of them.

    Data decide that, so the first plan could only expect it.
    """
    policy = session.step_program.hooks.named.get("memory")
    measured: Shares | None = getattr(policy, "measured", None)
    if measured is None or session.plan.prediction.choice.shares:
        return
    seen = asdict(measured)
    most = session.ranks.max(*seen.values())  # the rank with the most counts
    found = {name: type(seen[name])(value) for name, value in zip(seen, most, strict=True)}
    session.plan = session.plan.chosen(MEMORY, found, "measured in the first updates")
    session.folder.append(PLAN, session.plan.row())
    session.record.forecast(session.plan.row())


def revise_plan(session: Session, why: str) -> None:
    """A revision of the plan, with the speed that was measured."""
    measured = session.record.recent_positions_per_second(session.plan.tokens_per_update)
    session.plan = session.plan.revised(why, measured)
    session.folder.append(PLAN, session.plan.row())


class _Metering(RunHook):
    """While the meter runs: notes bytes by kind when gradients are there, and adds events up.

    A policy that works in small pieces makes hundreds of thousands of events a pass, which take
    more than its tensors; between passes few tensors are there.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def before_forward(self, share: float) -> None:
        """Add up those of the pass, or of the update, before this one."""
        self.session.meter.add_up()

    def before_optimizer(self, step: int) -> None:
        """Note bytes, and add up the events of the last pass."""
        session = self.session
        if session.meter.running:
            session.meter.add_up()
            session.record.content["measured_by_kind"] = _persisting(session)


def _persisting(session: Session) -> dict[str, int]:
    """Bytes by kind of what is there between passes, on this rank."""
    program = session.step_program
    state = [*program.state(), *program.hooks.held()]
    return bytes_by_kind(session.model, state, program.strategy.held())
