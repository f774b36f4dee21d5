"""What `comm: auto` becomes: the fastest of the exchanges that the recipe allows, by the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.core.machine import Machine
from modicum.core.machine.links import MeasuredLink
from modicum.core.machine.record import MachineRecord
from modicum.core.ranks.ranks import Ranks
from modicum.planner.exchanges import CANDIDATES, TriedWay, exchanges, step_rows, tried
from modicum.planner.predict import Predictor
from modicum.planner.prediction import Prediction
from modicum.planner.question import Question
from modicum.recipe import Recipe
from modicum.recipe.auto_exchange import is_auto, listed
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
    what was found before it only where a step is a twentieth faster. Each is tried in the layout
    that it would be planned in.

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
    going: list[TriedWay] = [(None, made, asked.recipe)]
    left = []
    for fields in (*EXACT[1:], *listed(section)):
        recipe, found, problem = _fitting(asked, fields)
        if found is not None:
            going.append((fields, found, recipe))
        elif fields not in EXACT:
            left.append(f"without {_named(fields)}: {problem}")
    ways = step_rows(asked, going, asked.link)
    best = preferred(ways)
    return best["comm"], "; ".join([_why(best, ways), *left])


def _fitting(
    asked: Question, fields: dict[str, Any] | None
) -> tuple[Recipe, Prediction | None, str]:
    """The recipe with this exchange, in the layout that it goes with; or why there is none."""
    recipe = asked.recipe
    try:
        recipe = recipe.changed(comm=fields)
        return recipe, asked.fitting(recipe), "it does not fit"
    except InputError as error:
        return recipe, None, error.problem


def ways_shown(asked: Question, made: Prediction, written: Recipe) -> list[JsonObject]:
    """Each way that goes with the plan's layout, and all that the recipe lists in their own."""
    if asked.link is None:
        return []
    own = listed(written.comm) if written.comm and is_auto(FIELD, written.comm) else []
    names = {each["method"] for each in own}
    others = [each for each in CANDIDATES if each is None or each["method"] not in names]
    found = list(tried(asked, made, [*others, *own]))
    for fields in own:
        if all(fields != way[0] for way in found):
            recipe, prediction, _ = _fitting(asked, fields)
            found += [] if prediction is None else [(fields, prediction, recipe)]
    return step_rows(asked, found, asked.link)


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


def _named(fields: Mapping[str, Any] | None) -> str:
    """A way with its fields.

    >>> _named({"method": "acp_sgd", "rank": 1})
    'acp_sgd, rank 1'
    """
    if fields is None:
        return PLAIN
    others = (f"{name} {value}" for name, value in fields.items() if name != "method")
    return ", ".join([fields["method"], *others])


def _why(best: JsonObject, ways: list[JsonObject]) -> str:
    others = [way for way in ways if way is not best]
    if not others:
        took = f"a step is to take {best['step_seconds']:.3g} s"
        return f"{took}, and nothing else goes with the recipe"
    said = [f"{way['step_seconds']:.3g} s with {_named(way['comm'])}" for way in (best, *others)]
    return f"a step is to take {'; '.join(said)}"
