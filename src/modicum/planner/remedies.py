"""What would make a recipe fit that does not: the cheapest changes, each tried on the predictor.

Up to three knobs are turned at once, and only where none of them is enough without the others.
There are thousands of such sets. What a knob saves in each phase is found by turning it alone and
next to each other method; a set whose savings do not add up to enough is not tried.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice
from typing import Any

from modicum.core.errors import InputError
from modicum.planner.few_traces import FewTraces, with_few_traces
from modicum.planner.knobs import METHOD, NUMERICS, Knob, tightening
from modicum.planner.question import Question
from modicum.recipe import SLOTS
from modicum.recipe.nested import assign

MOST_TOGETHER = 3
# Recipes that are tried before the search ends, and models that are traced for it, in seconds each;
# where the recipe itself is not traced, none is.
MOST_TRIED, MOST_TRACED = 600, 16

_NEARLY = 1.02
# What every reader of YAML takes for the same text without quotes: words and paths, but for those
# that some take for other values, and sizes.
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*|[0-9]+(\.[0-9]+)?[kKMGT]?i?B", re.ASCII)
_VALUES = {"null", "true", "false", "yes", "no", "on", "off"}

FieldValues = dict[str, Any]  # fields and their new values


@dataclass(frozen=True)
class Remedy:
    """Fields and their new values that make a recipe fit, and the bytes that it then needs."""

    change: FieldValues
    needs: int

    @property
    def words(self) -> str:
        """The change as arguments of the command line."""
        settings = (f"{field}={_spelled(value)}" for field, value in self.change.items())
        return " ".join(f"--set {shlex.quote(each)}" for each in settings)

    @property
    def yaml(self) -> str:
        """The change as lines of a recipe."""
        values: dict[str, Any] = {}
        for field, value in self.change.items():
            assign(values, field, value)
        return "\n".join(f"{section}: {_spelled(fields)}" for section, fields in values.items())


@dataclass(frozen=True)
class _Spent:
    """Bytes that count, of the most frugal choice: the most of any phase, and of each.

    Args:
        phases: next to an accelerator also the host's bytes, as of one more phase in which there
            is as much room as in the others.
    """

    needed: int
    phases: tuple[int, ...]


def remedies(asked: Question) -> Iterator[Remedy]:
    """Changes that bring a recipe's needs within its room, the cheapest first.

    Of sets of the same fields there is one, with the mildest values. Where no three changes are
    enough there is one set of four or five, if these are.
    """
    search, none = _Search(asked), True
    for cost in sorted({knob.cost for knob in search.knobs}):
        for count in range(1, MOST_TOGETHER + 1):
            for remedy in search.of(cost, count):
                none = False
                yield remedy
    for count in (MOST_TOGETHER + 1, MOST_TOGETHER + 2) if none else ():
        for cost in sorted({knob.cost for knob in search.knobs}):
            for remedy in islice(search.of(cost, count), 1):
                yield remedy
                return


def more_ranks(asked: Question) -> tuple[int, int] | None:
    """How many ranks would be enough if weights were sharded over all, and the bytes for each.

    None where no number of them is enough.
    """
    sharded = asked.changed({"parallel.strategy": "fsdp", "parallel.shard": None})
    for factor in (2, 4, 8):
        count = asked.ranks * factor
        if sharded is None or count > asked.recipe.training.batch_size:
            break
        try:
            found = asked.frugal(sharded, count)
        except InputError:
            break
        if asked.room.holds(found):
            return count, asked.room.needed(found)
    return None


class _Search:
    """What has been tried, and what knobs are seen to save."""

    def __init__(self, asked: Question) -> None:
        self._left, traced = MOST_TRIED, asked.frugal(asked.recipe).traced
        # Who asks of a model that arithmetic knows does not wait for the traces of others.
        self._asked = asked if traced else asked.without_traces()
        self._limit = asked.room.limit
        self._known: dict[str, _Spent | None] = {}
        self._traces = FewTraces(asked.recipe, MOST_TRACED) if traced else None
        layers = asked.predictor.adapted_layers(asked.recipe, asked.inputs.config)
        knobs = tightening(asked.recipe, asked.ranks, layers)
        self.knobs = with_few_traces(knobs) if traced else knobs
        self._savings: dict[int, tuple[int, ...] | None] = {}

    def of(self, cost: int, count: int) -> Iterator[Remedy]:
        """Remedies of so many knobs, of which the one that costs most has this cost."""
        within = [knob for knob in self.knobs if knob.cost <= cost]
        for chosen in combinations(within, count):
            if max(knob.cost for knob in chosen) != cost or not self._promises(chosen):
                continue
            change = self._mildest(chosen)
            if change is not None and (spent := self.spent(change)) is not None:
                yield Remedy(change, spent.needed)

    def spent(self, change: FieldValues) -> _Spent | None:
        """What the recipe needs with a change; None where it is refused, or enough was tried."""
        key = json.dumps(change, sort_keys=True)
        if key not in self._known:
            self._known[key] = self._tried(change) if self._left else None
        return self._known[key]

    def _tried(self, change: FieldValues) -> _Spent | None:
        recipe = self._asked.changed(change)
        if recipe is None or (self._traces is not None and not self._traces.allow(recipe)):
            return None
        self._left -= 1
        try:
            found = self._asked.frugal(recipe)
        except InputError:
            return None
        room = self._asked.room_of(recipe)
        phases = tuple(size + self._limit - room.limit for size in room.by_phase(found))
        if room.device == "cpu":
            return _Spent(max(phases), phases)
        return _Spent(max(phases), (*phases, room.limit + found.host_bytes - room.host_room))

    def _fits(self, change: FieldValues) -> bool:
        """Whether the recipe is within its room with a change."""
        return (spent := self.spent(change)) is not None and max(spent.phases) <= self._limit

    def _promises(self, knobs: tuple[Knob, ...]) -> bool:
        """Whether these knobs can be turned together, and may save enough."""
        if not all(one.apart(two) for one, two in combinations(knobs, 2)):
            return False
        left = self._base.phases
        for knob in knobs:
            if (saved := self._saved(knob)) is None:
                return False
            left = _less(left, saved)
        return max(left) <= self._limit

    def _mildest(self, knobs: tuple[Knob, ...]) -> FieldValues | None:
        """The mildest values of these knobs that fit together, and none of them is idle."""
        change = {knob.field: self._strongest(knob) for knob in knobs}
        if not self._fits(change):
            return None
        for knob in sorted(knobs, key=lambda knob: -knob.cost):
            for value in self._by_mildness(knob, change):
                if self._fits(milder := {**change, knob.field: value}):
                    change = milder
                    break
        fewer = combinations(change.items(), len(change) - 1) if len(change) > 1 else ()
        return None if any(self._fits(dict(some)) for some in fewer) else change

    def _by_mildness(self, knob: Knob, change: FieldValues) -> Sequence[Any]:
        """A knob's values, the mildest first; of ways to hold numbers, that with most bits."""
        if knob.cost != NUMERICS:
            return knob.values
        tried = ((self.spent({**change, knob.field: value}), value) for value in knob.values)
        going = [(spent.needed, value) for spent, value in tried if spent is not None]
        return [value for _, value in sorted(going, key=lambda pair: -pair[0])]

    @cached_property
    def _base(self) -> _Spent:
        spent = self.spent({})
        assert spent is not None
        return spent

    @cached_property
    def _contexts(self) -> list[tuple[Knob, FieldValues]]:
        """Other methods, none, what methods ask for: next to them a knob may save more, or go."""
        found = []
        for knob in self.knobs:
            others = _names_methods(knob) or _asked_for(knob) or knob.field == "compress"
            if knob.cost == METHOD and others:
                change = {knob.field: self._strongest(knob)}
                if self.spent(change) is not None:
                    found.append((knob, change))
        return found

    def _saved(self, knob: Knob) -> tuple[int, ...] | None:
        """What a knob saves in each phase, the most that was seen; None: nothing, or it is refused
        everywhere."""
        key = id(knob)
        if key not in self._savings:
            self._savings[key] = self._seen_saving(knob)
        return self._savings[key]

    def _seen_saving(self, knob: Knob) -> tuple[int, ...] | None:
        value = {knob.field: self._strongest(knob)}
        alone = self._saving({}, value)
        if _asked_for(knob):
            return alone
        if alone is not None and max(alone) <= 0 and _of_a_method(knob):
            return None  # nor next to another method
        found = [alone] + [
            self._saving(change, value)
            for other, change in self._contexts
            if knob.apart(other) and not (alone and _asked_for(other))
        ]
        seen = [saving for saving in found if saving is not None]
        best = tuple(map(max, zip(*seen, strict=True))) if seen else (0,)
        return best if max(best) > 0 else None

    def _saving(self, context: FieldValues, value: FieldValues) -> tuple[int, ...] | None:
        before, after = self.spent(context), self.spent({**context, **value})
        if before is None or after is None:
            return None
        return _less(before.phases, after.phases)

    def _strongest(self, knob: Knob) -> Any:
        """The value that needs least; of methods that do not go alone, next to another one.

        Of methods that need nearly the same it is the one that is preferred.
        """
        if not _names_methods(knob):
            return knob.values[-1]
        contexts = [{}] if knob.cost == METHOD else [{}, *(change for _, change in self._contexts)]
        for context in contexts:
            tried = [(self.spent({**context, knob.field: value}), value) for value in knob.values]
            going = [(spent.needed, value) for spent, value in tried if spent is not None]
            if going:
                least = min(needed for needed, _ in going)
                return next(value for needed, value in going if needed <= _NEARLY * least)
        return knob.values[-1]


def _names_methods(knob: Knob) -> bool:
    return knob.field.endswith(".method") or isinstance(knob.values[0], dict)


def _of_a_method(knob: Knob) -> bool:
    """Whether its field is one of a method that is there."""
    return knob.field.partition(".")[0] in SLOTS and not _names_methods(knob)


def _asked_for(knob: Knob) -> bool:
    """Whether it saves nothing by itself, and some methods ask for it."""
    return knob.field == "training.clip_norm"


def _less(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _spelled(value: object) -> str:
    """A value in YAML, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_spelled(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_spelled, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) is not None and value.lower() not in _VALUES
        return value if plain else json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)
