"""What would make a recipe fit that does not: the cheapest changes, each tried on the predictor.

A change costs by what it touches, in this order: how the arithmetic is split, its precision, the
method, the length of the rows, the shape of a new model. Sets of several changes are offered only
where none of them is enough alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from modicum.core.errors import InputError
from modicum.recipe import Recipe

# The bytes that a recipe needs at its most frugal.
Needs = Callable[[Recipe], int]
MOST_TOGETHER = 3


@dataclass(frozen=True)
class Remedy:
    """Fields and their new values that make a recipe fit, and the bytes that it then needs."""

    change: dict[str, Any]
    needs: int

    @property
    def words(self) -> str:
        """The change as arguments of the command line."""
        return " ".join(f"--set {field}={_spelled(value)}" for field, value in self.change.items())


@dataclass(frozen=True)
class _Knob:
    """A field, the values to try, the mildest first, and the rank of its cost."""

    cost: int
    field: str
    values: tuple[Any, ...]


def remedies(recipe: Recipe, needs: Needs, limit: int, ranks: int = 1) -> Iterator[Remedy]:
    """Changes that bring a recipe's needs within the limit, the cheapest first."""
    knobs = _knobs(recipe, ranks)
    known: dict[str, int | None] = {}

    def fits(change: dict[str, Any]) -> bool:
        key = json.dumps(change, sort_keys=True)
        if key not in known:
            try:
                known[key] = needs(_sketched(recipe, change))
            except InputError:
                known[key] = None
        needed = known[key]
        return needed is not None and needed <= limit

    for cost in sorted({knob.cost for knob in knobs}):
        within = [knob for knob in knobs if knob.cost <= cost]
        for count in range(1, MOST_TOGETHER + 1):
            for chosen in combinations(within, count):
                if max(knob.cost for knob in chosen) != cost:
                    continue
                change = _mildest(chosen, fits)
                if change is None or not _allowed(recipe, change):
                    continue
                yield Remedy(change, known[json.dumps(change, sort_keys=True)] or 0)


def more_ranks(
    recipe: Recipe, needs: Callable[[Recipe, int], int], limit: int, ranks: int
) -> tuple[int, int] | None:
    """How many ranks would be enough if weights were sharded over all, and the bytes for each.

    None where a recipe is planned for one rank, or no number of them is enough.
    """
    cut = _sketched(recipe, {"parallel.strategy": "fsdp", "parallel.shard": None})
    for factor in (2, 4, 8) if ranks > 1 else ():
        if ranks * factor > recipe.training.batch_size:
            break
        needed = needs(cut, ranks * factor)
        if needed <= limit:
            return ranks * factor, needed
    return None


def _mildest(
    knobs: tuple[_Knob, ...], fits: Callable[[dict[str, Any]], bool]
) -> dict[str, Any] | None:
    """The mildest values of these knobs that fit together and not with one of them left out."""
    if not fits({knob.field: knob.values[-1] for knob in knobs}):
        return None
    places = product(*(range(len(knob.values)) for knob in knobs))
    for place in sorted(places, key=lambda place: (sum(place), max(place))):
        change = {knob.field: knob.values[i] for knob, i in zip(knobs, place, strict=True)}
        if not fits(change):
            continue
        fewer = combinations(change.items(), len(change) - 1) if len(change) > 1 else ()
        if any(fits(dict(rest)) for rest in fewer):
            continue
        return change
    return None


def _knobs(recipe: Recipe, ranks: int) -> list[_Knob]:
    training, adapter, model = recipe.training, recipe.adapter, recipe.model
    new = model.path is None
    knobs = []
    if training.micro_batch_size not in ("auto", 1):
        knobs.append(_Knob(0, "training.micro_batch_size", ("auto",)))
    if training.recompute == "none":
        knobs.append(_Knob(0, "training.recompute", ("blocks",)))
    if recipe.checkpoint.asynchronous is True:
        knobs.append(_Knob(0, "checkpoint.asynchronous", ("auto",)))
    knobs += _knobs_of_ranks(recipe, ranks)
    if training.precision == "fp32":
        knobs.append(_Knob(1, "training.precision", ("bf16",)))
    if adapter is None and not new:
        knobs.append(_Knob(2, "adapter.method", ("lora",)))
    if adapter is not None:
        knobs.append(_Knob(2, "adapter.rank", _fractions(adapter.get("rank", 1), 1)))
    knobs.append(_Knob(3, "data.sequence_length", _fractions(recipe.data.sequence_length, 32)))
    if new:
        if not model.tied_embeddings:
            knobs.append(_Knob(4, "model.tied_embeddings", (True,)))
        if recipe.data.tokenizer is None:
            smaller = _fractions(model.vocabulary_size, 512)
            knobs.append(_Knob(4, "model.vocabulary_size", smaller))
        knobs.append(_Knob(4, "model.layers", _fractions(model.layers, 1)))
        knobs.append(_Knob(4, "model.width", _fractions(model.width, 2 * model.heads)))
    return [knob for knob in knobs if knob.values]


def _knobs_of_ranks(recipe: Recipe, ranks: int) -> list[_Knob]:
    """How the weights are sharded over the ranks."""
    section = recipe.parallel
    if ranks == 1:
        return []
    if section.strategy == "ddp":
        return [_Knob(0, "parallel.strategy", ("fsdp",))]
    knobs = []
    if section.shard is not None:
        larger = [n for n in range(section.shard + 1, ranks + 1) if ranks % n == 0]
        knobs.append(_Knob(0, "parallel.shard", tuple(larger)))
    if not section.reshard_after_forward:
        knobs.append(_Knob(0, "parallel.reshard_after_forward", (True,)))
    return knobs


def _fractions(value: int, least: int) -> tuple[int, ...]:
    """A half, a quarter, an eighth and a sixteenth of a value, while it is not below `least`."""
    return tuple(value // part for part in (2, 4, 8, 16) if value // part >= least)


def _sketched(recipe: Recipe, change: dict[str, Any]) -> Recipe:
    """The recipe with a change that is not checked yet: checking costs more than predicting."""
    for path, value in change.items():
        section, name = path.split(".")
        if section == "adapter":
            changed: Any = {**(recipe.adapter or {}), name: value}
        else:
            changed = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: changed})
    return recipe


def _allowed(recipe: Recipe, change: dict[str, Any]) -> bool:
    """Whether the recipe may be changed so."""
    try:
        recipe.changed(**{path.replace(".", "__"): value for path, value in change.items()})
    except InputError:
        return False
    return True


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
