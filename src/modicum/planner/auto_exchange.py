"""What `comm: auto` becomes: the fastest of the exchanges that the recipe allows, by the link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modicum.core.files import JsonObject
from modicum.core.ranks.ranks import Ranks
from modicum.planner.exchanges import exchanges
from modicum.planner.question import Question
from modicum.recipe.auto_exchange import listed

FIELD = "comm"
PLAIN = "numbers as they are"
# What changes no number. Methods that do are tried where the recipe lists them.
EXACT: tuple[dict[str, Any] | None, ...] = (None, {"method": "dear"})
# A way that is further from exact has to be faster by this part.
GAIN = 0.1


def without_auto(asked: Question, section: Mapping[str, Any], live: Ranks) -> Question:
    """The question with the exchange that was chosen, and a row of the plan that says why.

    Ways are tried from exact ones to those that the recipe lists, in its order, and one replaces
    what was found before it only where a step is a tenth faster.

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
    if asked.link is None:
        return None, "no link was measured, which modicum bench link does"
    made = asked.fitting(asked.recipe)
    if made is None:
        return None, "nothing fits, whatever travels"
    ways = exchanges(asked, made, asked.link, (*EXACT, *listed(section)))
    best = ways[0]
    for way in ways[1:]:
        if way["step_seconds"] < (1 - GAIN) * best["step_seconds"]:
            best = way
    return best["comm"], _why(best, ways)


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
