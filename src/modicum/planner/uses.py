"""What a plan that has room could spend it on, each tried on the planner.

In the order of what it changes: less work for the same result first, then numbers that are held in
more bits, more trained parameters, longer rows, a larger new model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from modicum.core.errors import InputError
from modicum.planner.few_traces import FewTraces
from modicum.planner.knobs import ROWS, SHAPE, Knob, loosening
from modicum.planner.prediction import Prediction
from modicum.planner.question import Question
from modicum.planner.remedies import Remedy
from modicum.recipe import Recipe

# Models that are traced for it, in seconds each; of a knob the most lavish value, and the least.
MOST_TRACED = 6


@dataclass(frozen=True)
class Use:
    """A change that a plan has room for.

    Args:
        remedy: the change, and the bytes that the recipe then needs.
        work: of an update, next to the work without the change.
        trainable: elements that are then trained.
        recompute: whether blocks then run again.
    """

    remedy: Remedy
    work: float
    trainable: int
    micro_batch_size: int
    recompute: bool

    def row(self) -> dict[str, Any]:
        """What `modicum plan --json` says of it."""
        return {
            "set": self.remedy.words,
            "yaml": self.remedy.yaml,
            "needs_bytes": self.remedy.needs,
            "work": self.work,
            "trainable": self.trainable,
            "micro_batch_size": self.micro_batch_size,
            "recompute": self.recompute,
        }


def uses_of_room(asked: Question, made: Prediction) -> Iterator[Use]:
    """Of each knob the most that fits without giving up what the plan has.

    For models that are traced fewer values are tried, as many try another trace; for the others
    those alone that need none.
    """
    context = getattr(asked.inputs.config, "context", None)
    limit = context if asked.recipe.model.path is not None else None
    knobs = loosening(asked.recipe, asked.ranks, limit)
    traces = FewTraces(asked.recipe, MOST_TRACED) if made.traced else None
    if traces is None:
        asked = asked.without_traces()
    else:
        knobs = [replace(each, values=_ends(each.values)) for each in knobs]
    for knob in knobs:
        if (use := _most(asked, made, knob, traces)) is not None:
            yield use


def _ends(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values if len(values) < 3 else (values[0], values[-1])


def _most(asked: Question, made: Prediction, knob: Knob, traces: FewTraces | None) -> Use | None:
    for value in reversed(knob.values):
        change = {knob.field: value}
        recipe = asked.changed(change)
        if recipe is None or not (traces is None or traces.allow(recipe)):
            continue
        try:
            found = None if _idle(asked, recipe, knob) else asked.fitting(_as_now(made, recipe))
        except InputError:
            continue
        if found is None or found == made or _gives_up(made, found):
            continue
        return Use(
            Remedy(change, asked.room.needed(found)),
            found.flops / max(made.flops, 1),
            found.trainable,
            found.choice.micro_batch_size,
            found.choice.recompute,
        )
    return None


def _idle(asked: Question, recipe: Recipe, knob: Knob) -> bool:
    """Whether the task makes the same rows and the same model of a changed recipe."""
    if knob.cost not in (ROWS, SHAPE):
        return False
    same_rows = asked.task.row(recipe) == asked.task.row(asked.recipe)
    return same_rows and bool(asked.config(recipe) == asked.config(asked.recipe))


def _as_now(made: Prediction, recipe: Recipe) -> Recipe:
    """The recipe without blocks that run again, where the plan has none."""
    if made.choice.recompute or recipe.training.recompute != "auto":
        return recipe
    return recipe.changed(training__recompute="none")


def _gives_up(made: Prediction, found: Prediction) -> bool:
    """Whether a change is paid with what the plan had: weights on every rank."""
    return found.choice.layout.shards > made.choice.layout.shards
