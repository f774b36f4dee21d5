"""The refusal of a recipe that no plan keeps within its budget, with what would make it fit."""

from __future__ import annotations

from itertools import islice

from modicum.core.errors import DoesNotFit
from modicum.core.units import format_bytes
from modicum.planner.prediction import Prediction
from modicum.planner.question import Question
from modicum.planner.remedies import Remedy, more_ranks, remedies
from modicum.recipe import Recipe

MOST_SHOWN = 3
_CHANGES = "What would make it fit, cheapest first:"
_NONE = "No five changes together are enough"


def does_not_fit(asked: Question) -> DoesNotFit:
    """The refusal, with the three cheapest changes that would make it fit."""
    recipe, room, ranks = asked.recipe, asked.room, asked.ranks
    least = asked.frugal(recipe)
    needed, base = room.needed(least), room.base if room.device == "cpu" else 0
    found = list(islice(remedies(asked), MOST_SHOWN))
    if needed <= room.limit and not room.host_holds(least):
        return _host_is_short(asked, least, found)
    larger = _larger_budget(recipe, needed, base, room.most) if room.host_holds(least) else {}
    if len(found) < MOST_SHOWN and larger:
        found.append(Remedy(larger, needed))
    # Bytes are reported as those that the budget counts.
    beyond = bool(base) and room.limit - base == recipe.budget.tensors
    uncounted = base if beyond else 0
    changes = [f"{each.words} (needs {format_bytes(each.needs - uncounted)})" for each in found]
    few = ranks > 1 or len(changes) < MOST_SHOWN
    if few and (more := more_ranks(asked)) is not None:
        count, each = more
        all_of_it = "" if recipe.parallel.shard is None else " --set parallel.shard=null"
        changes.append(
            f"{count} ranks on more machines, with --set parallel.strategy=fsdp{all_of_it} "
            f"(needs {format_bytes(each - uncounted)} for each)"
        )
    what = "the process" if room.device == "cpu" else "its tensors"
    if ranks > 1:
        what += " of each rank"
    own = f"{format_bytes(room.base)} %s Python and torch before the first tensor"
    if beyond:
        what += f", beyond {own % 'of'}"
    elif room.device == "cpu":
        what += f", of which {own % 'are'}"
    end = _CHANGES if changes else _NONE
    unit = "; a number without a unit is bytes" if room.limit - uncounted < 10**6 else ""
    return DoesNotFit(
        f"does not fit {room.name}{unit}: "
        f"the most frugal plan needs {format_bytes(needed - uncounted)} for {what}. {end}",
        changes,
        yaml=found[0].yaml if found else "",
    )


def _host_is_short(asked: Question, least: Prediction, found: list[Remedy]) -> DoesNotFit:
    """The refusal where the accelerator has room, and the memory next to it has not."""
    room, of_each = asked.room, " for each rank" if asked.ranks > 1 else ""
    return DoesNotFit(
        f"does not fit the host's free memory ({format_bytes(room.host)}): the copy of the state "
        f"that checkpoints are written from needs {format_bytes(least.host_bytes)}{of_each} there, "
        f"beyond {format_bytes(room.base)} of Python and torch before the first tensor. "
        f"{_CHANGES if found else _NONE}",
        [each.words for each in found],
        yaml=found[0].yaml if found else "",
    )


def _larger_budget(recipe: Recipe, needed: int, base: int, most: int) -> dict[str, str]:
    """The limits that are too small, as large as they need to be; empty: no machine's room for it.

    Args:
        base: what the process holds before the first tensor, where it counts.
        most: what the process could hold on this machine.
    """
    found = {}
    for name, uncounted in (("memory", 0), ("tensors", base)):
        limit: int | None = getattr(recipe.budget, name)
        least = needed - uncounted
        if limit is not None and limit < least:
            # The next process may begin a little larger.
            larger = -(-least * 102 // 10**9) * 10**7
            if larger + uncounted > most:
                return {}
            found[f"budget.{name}"] = f"{larger // 10**6}MB"
    return found
