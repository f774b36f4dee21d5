"""What saves of a run cost, and how often they are made because of it."""

from __future__ import annotations

from statistics import median

from modicum.core.units import Every
from modicum.planner.save_interval import EVERY, SaveForecast
from modicum.trainer.folder import PLAN
from modicum.trainer.session import Session

_RECENT = 5  # saves whose median counts
_OTHER = 0.2  # a smaller change of the interval is no new revision of the plan


def learn_save_cost(session: Session) -> None:
    """Take in what the save that was just begun cost, where the recipe states how often runs fail.

    With `checkpoint.every: auto` the interval follows it, as a revision of the plan. All ranks
    call this at the same places and get the same answer: the slowest rank's time counts.
    """
    asked = session.plan.recipe.checkpoint
    if asked.hours_between_failures is None:
        return
    between = 3600.0 * asked.hours_between_failures
    stalled, written = session.ranks.max(session.stalled, session.written)
    session.save_costs.append(stalled)
    # The first one also makes room for the copy of the state.
    cost = median((session.save_costs[1:] or session.save_costs)[-_RECENT:])
    now = session.plan.saving
    if asked.every == "auto":
        found = SaveForecast.best(cost, between, least=max(written, 1.0))
        before = now.seconds
        if before is None or abs(found.interval / before - 1) > _OTHER:
            value = f"{max(1, round(found.interval))}s"
            session.plan = session.plan.chosen(EVERY, value, found.words())
            session.folder.append(PLAN, session.plan.row())
    else:
        found = SaveForecast(_seconds(session, now), cost, between)
    session.record.content["saves"] = found.row()


def _seconds(session: Session, every: Every) -> float:
    if every.seconds is not None:
        return every.seconds
    rate = session.record.recent_positions_per_second(session.plan.tokens_per_update)
    return float(every.steps or 1) * session.plan.tokens_per_update / rate
