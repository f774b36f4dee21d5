"""A link that is far slower than it was measured to be is reported in a run's first ten updates.

What is found stands in `anomalies.jsonl`, with the exchange that `comm: auto` would choose on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

from modicum.core.ranks.observed_groups import begin_observing, end_observing
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.seen_link import SeenLink, UpdateCalls, seen_link
from modicum.core.units import format_bytes
from modicum.planner.auto_exchange import PLAIN, preferred_on
from modicum.planner.plan import Plan

SKIPPED, SEEN = 2, 6  # updates before those that are looked at, and of these
# It is slow if calls take so many times as long as they should, and so much of an update.
SLOWER, SHARE = 10.0, 0.1


class LinkCheck(AbstractContextManager[None]):
    """Looks at the calls of some updates, where it is known what the link should carry.

    As a context it observes the calls of the block, until it has seen enough.
    """

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self._link, self._ranks = plan.link, ranks
        self._calls = UpdateCalls(self._crosses)
        self._begun, self._seconds, self._observing = 0, 0.0, False

    def __enter__(self) -> None:
        if self._link is not None and not self._ranks.alone:
            begin_observing(self._calls)
            self._observing = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    @contextmanager
    def update(self) -> Iterator[None]:
        """The block makes an update."""
        if self._observing and self._begun >= SKIPPED:
            self._calls.next_update()
        before = self._ranks.clock.seconds
        yield
        self._begun += 1
        if self._begun > SKIPPED:
            self._seconds += self._ranks.clock.seconds - before

    def found(self) -> SeenLink | None:
        """What was seen of a link that is slow, once, after enough updates; all ranks call this."""
        # The last update's calls may hide behind the next one's forward pass, and have not ended.
        if not self._observing or self._begun <= SKIPPED + SEEN:
            return None
        self._leave()
        assert self._link is not None
        seen = seen_link(self._calls.updates[:SEEN], self._link, self._ranks)
        self._calls.updates.clear()
        update = self._seconds / (self._begun - SKIPPED)
        slow = seen is not None and seen.slower >= SLOWER and seen.busy >= SHARE * update
        return seen if slow else None

    def _leave(self) -> None:
        if self._observing:
            end_observing(self._calls)
            self._observing = False

    def _crosses(self, members: tuple[int, ...]) -> bool:
        """Whether calls among these ranks go over the link between hosts, where there is one."""
        local = self._ranks.local_size
        several = local < self._ranks.size
        return not several or len({rank // local for rank in members}) > 1


def slow_link_row(plan: Plan, seen: SeenLink) -> dict[str, Any]:
    """What is written of a slow link."""
    assert plan.link is not None
    planned, rate = plan.link.rate, seen.link.rate
    best, here = preferred_on(plan, seen.link)
    chosen, took = (best["comm"] or {"method": PLAIN})["method"], here["step_seconds"]
    if best["here"]:
        advice = f"{chosen}, as it is, at {took:.3g} s a step"
    else:
        faster = best["step_seconds"]
        advice = f"{chosen}, by which a step is to take {faster:.3g} s, not {took:.3g} s"
    return {
        "kind": "slow link",
        "rate": rate,
        "planned_rate": planned,
        "slower": round(seen.slower, 1),
        "seconds": round(seen.busy, 4),
        "would_choose": best["comm"],
        "ends": False,
        "sentence": f"the link carries {format_bytes(round(rate))} a second, "
        f"{100 * rate / planned:.2g} % of the {format_bytes(round(planned))} that the plan counts "
        f"with, and holds an update's calls for {seen.busy:.3g} s; comm: auto with all ways listed "
        f"would choose {advice}",
    }
