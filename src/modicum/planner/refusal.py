"""The refusal of a recipe that no plan keeps within its budget, with what would make it fit."""

from __future__ import annotations

from itertools import islice

from modicum.core.errors import DoesNotFit
from modicum.core.units import format_bytes
from modicum.planner.choose import Room, smallest
from modicum.planner.predict import Predictor
from modicum.planner.remedies import Remedy, more_ranks, remedies
from modicum.recipe import Recipe
from modicum.tasks import AnyTask, Inputs


def does_not_fit(
    recipe: Recipe, task: AnyTask, inputs: Inputs, predictor: Predictor, room: Room, ranks: int
) -> DoesNotFit:
    """The refusal, with the three cheapest changes that would make it fit."""

    def needs(changed: Recipe, count: int = ranks) -> int:
        return smallest(changed, task.reconfigured(inputs, changed), predictor, room, count)

    needed, base = needs(recipe), room.base if room.device == "cpu" else 0
    found = list(islice(remedies(recipe, needs, room.limit, ranks), 3))
    if len(found) < 3 and (larger := _larger_budget(recipe, needed, base, room.most)):
        found.append(Remedy(larger, needed))
    # Bytes are reported as those that the budget counts.
    beyond = bool(base) and room.limit - base == recipe.budget.tensors
    uncounted = base if beyond else 0
    changes = [f"{each.words} (needs {format_bytes(each.needs - uncounted)})" for each in found]
    if (more := more_ranks(recipe, needs, room.limit, ranks)) is not None:
        count, each = more
        changes.append(
            f"{count} ranks on more machines, with --set parallel.strategy=fsdp "
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
    return DoesNotFit(
        f"does not fit {room.name}: the most frugal plan needs {format_bytes(needed - uncounted)} "
        f"for {what}"
        + (". What would make it fit, cheapest first:" if changes else ", and no change is enough"),
        changes,
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
