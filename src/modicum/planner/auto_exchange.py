"""What `comm: auto` becomes: the fastest of the exchanges that the recipe allows, by the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modicum.core.files import JsonObject
from modicum.core.machine import Machine
from modicum.core.machine.links import MeasuredLink
from modicum.core.machine.record import MachineRecord
from modicum.core.ranks.ranks import Ranks
from modicum.planner.exchanges import exchanges
from modicum.planner.predict import Predictor
from modicum.planner.question import Question
from modicum.recipe import Recipe
from modicum.recipe.auto_exchange import listed
from modicum.tasks import Inputs

if TYPE_CHECKING:
    from modicum.planner.plan import Plan

FIELD = "comm"
PLAIN = "numbers as they are"
# What changes no number. Methods that do are tried where the recipe lists them.
EXACT: tuple[dict[str, Any] | None, ...] = (None, {"method": "dear"})
# A way that is further from exact has to be faster by this part.
GAIN = 0.05


def without_auto(asked: Question, section: Mapping[str, Any], live: Ranks) -> Question:
    """The question with the exchange that was chosen, and a row of the plan that says why.

    Ways are tried from exact ones to those that the recipe lists, in its order, and one replaces
    what was found before it only where a step is a twentieth faster.

    Args:
        asked: whose recipe has no exchange of its own.
        section: the recipe's, which left it open.
        live: the ranks, where they are there; all of them call this, and rank 0 decides.
    """
    chosen, why = live.broadcast(list(_chosen(asked, section)))
    row = {"field": FIELD, "value": PLAIN if chosen is None else chosen["method"], "why": why}
    recipe = asked.recipe if chosen is None else asked.recipe.changed(comm=chosen)
    return replace(asked, recipe=recipe, settled=(*asked.settled, row))


def _chosen(asked: Question, section: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    if asked.ranks == 1:
        return None, "there is one rank, and nothing travels"
    if asked.link is None and asked.device == "cuda":
        return None, "links between accelerators are not measured"
    if asked.link is None:
        return None, "no link was measured, which modicum bench link does"
    made = asked.fitting(asked.recipe)
    if made is None:
        return None, "nothing fits, whatever travels"
    ways = exchanges(asked, made, asked.link, (*EXACT, *listed(section)), asked.room.holds)
    best = preferred(ways)
    return best["comm"], _why(best, ways)


def preferred(ways: Sequence[JsonObject]) -> JsonObject:
    """Of ways from exact ones on, the one that is taken.

    >>> exact, coded = {"step_seconds": 1.0}, {"step_seconds": 0.95}
    >>> preferred([exact, coded]) is exact, preferred([exact, coded, {"step_seconds": 0.5}])
    (True, {'step_seconds': 0.5})
    """
    best = ways[0]
    for way in ways[1:]:
        if way["step_seconds"] < (1 - GAIN) * best["step_seconds"]:
            best = way
    return best


def preferred_on(plan: Plan, link: MeasuredLink) -> tuple[JsonObject, JsonObject]:
    """What `auto` would choose on a link, were all ways listed, and the way that a plan has."""
    asked = _Planned(
        plan.recipe, plan.inputs, plan.machine, plan.record, plan.device,
        Predictor(plan.device, plan.prepared),
    )  # fmt: skip
    ways = exchanges(asked, plan.prediction, link)
    here = next(way for way in ways if way["here"])
    return preferred(ways), here


@dataclass(frozen=True)
class _Planned:
    """A plan as other ways are tried on it."""

    recipe: Recipe
    inputs: Inputs
    machine: Machine
    record: MachineRecord
    device: str
    predictor: Predictor


def _why(best: JsonObject, ways: list[JsonObject]) -> str:
    others = [way for way in ways if way is not best]
    took = f"a step is to take {best['step_seconds']:.3g} s"
    if not others:
        return f"{took}, and nothing else goes with the recipe"
    said = ", ".join(
        f"{way['step_seconds']:.3g} s with {(way['comm'] or {'method': PLAIN})['method']}"
        for way in others
    )
    return f"{took}, {said}"
