"""Which changes are tried where each changed model is traced anew, which takes seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from modicum.planner.knobs import Knob
from modicum.recipe import Recipe

# Of a section whose methods change the model: the one that is tried, and the fields that say how
# large it is. What is not named here, such as an optimizer, is in no trace.
_TRIED = {"adapter": "lora", "linear": "nf4", "memory": None, "compress": None}
_SIZES = ("adapter.rank", "adapter.targets")
_IN_TRACES = {"task", "model", "plugins", *_TRIED}


def with_few_traces(knobs: Sequence[Knob]) -> list[Knob]:
    """Of these knobs those that are worth a trace each: of methods, the usual one alone.

    >>> from modicum.planner.knobs import METHOD
    >>> adapters = Knob(METHOD, "adapter.method", ("mos", "lora"))
    >>> [knob.values for knob in with_few_traces([adapters, Knob(METHOD, "compress", ("fwsvd",))])]
    [('lora',)]
    """
    found = []
    for knob in knobs:
        slot, _, name = knob.field.partition(".")
        if slot in _TRIED and knob.field not in _SIZES:
            usual = [v for v in knob.values if name == "method" and v == _TRIED[slot]]
            knob = replace(knob, values=tuple(usual))
        if knob.values:
            found.append(knob)
    return found


class FewTraces:
    """Which changed recipes may be tried: those of models that are traced, and some others.

    Args:
        recipe: as it stands; the trace of it is there.
        most: how many other models may be traced.
    """

    def __init__(self, recipe: Recipe, most: int) -> None:
        self._known, self._most = {_traced(recipe)}, most + 1

    def allow(self, recipe: Recipe) -> bool:
        """Whether it may be tried; if so, its model counts as traced."""
        if (model := _traced(recipe)) not in self._known and len(self._known) < self._most:
            self._known.add(model)
        return model in self._known


def _traced(recipe: Recipe) -> str:
    """What of a recipe decides which model is traced, and on which rows."""
    sections = recipe.model_dump(mode="json", include=_IN_TRACES)
    rows = recipe.training.precision, recipe.data.sequence_length
    return json.dumps([sections, *rows], sort_keys=True)
