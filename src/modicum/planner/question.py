"""A recipe on a machine, looked at: what plans, refusals and advice are made from."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.core.heap import map_for
from modicum.core.machine import Machine
from modicum.core.machine.links import MeasuredLink
from modicum.core.machine.record import MachineRecord
from modicum.planner.choose import Room, choices, first_that_fits
from modicum.planner.precision import export_rows, settled
from modicum.planner.predict import Predictor
from modicum.planner.prediction import Choice, Prediction
from modicum.planner.profiles import Profile
from modicum.recipe import Recipe
from modicum.tasks import AnyTask, Inputs

# Gradients of fewer bytes than this part of the peak decide nothing.
_SMALL = 1 / 64


def map_as(recipe: Recipe, device: str) -> None:
    """Map tensors as a run of the recipe does, which the record and the forecasts depend on."""
    map_for(budget=device == "cpu" and recipe.budget.limits)


@dataclass(frozen=True)
class Question:
    """A recipe, its inputs, and the machine that it is planned for.

    Recipes that differ from it in fields are tried on it too; what they share is done once.

    Args:
        device: where the run would be, cpu or cuda.
        room: the bytes that a rank may take.
        counts: what is known of the data.
        ranks: how many there are.
        profile: where the machine's figures are from, if not from this machine.
        link: between the ranks, where it was measured or stated.
        settled: what the recipe left open and the inputs alone decide, as rows of a plan.
        written: the recipe with all of that still open, which changes are made to; None: it is the
            recipe itself.
        compiled: bytes of the room's base that a run without compiled blocks does not take.
    """

    recipe: Recipe
    task: AnyTask
    inputs: Inputs
    device: str
    machine: Machine
    record: MachineRecord
    room: Room
    predictor: Predictor
    counts: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    profile: Profile | None = None
    settled: tuple[JsonObject, ...] = ()
    link: MeasuredLink | None = None
    written: Recipe | None = None
    compiled: int = 0
    _configs: dict[str, Any] = field(default_factory=dict, repr=False)

    def changed(self, change: Mapping[str, Any]) -> Recipe | None:
        """The recipe that a plan with other values of some fields would be for.

        What the inputs decide is settled anew. The exchange that was chosen stays, and so do the
        fields of the adapter that training starts from. None: no plan is made of it, as parts of
        it do not go together.
        """
        recipe = changed(self.recipe if self.written is None else self.written, change)
        if recipe is None:
            return None
        dtypes = self.task.dtypes_of(self.inputs, recipe)
        try:
            recipe, _ = settled(recipe, dtypes)
            export_rows(recipe, dtypes, rounds=self.task.rounds)
            return self._with_chosen(recipe, change)
        except InputError:
            return None

    def _with_chosen(self, recipe: Recipe, change: Mapping[str, Any]) -> Recipe:
        """A changed recipe with what does not depend on the change."""
        exchanges = any(name.partition(".")[0] == "comm" for name in change)
        if recipe.comm != self.recipe.comm and not exchanges:
            recipe = recipe.changed(comm=self.recipe.comm)
        if recipe.model.adapter is not None and recipe.adapter is not None:
            begun = {**(self.recipe.adapter or {}), **recipe.adapter}
            if begun != recipe.adapter:
                recipe = recipe.changed(adapter=begun)
        return recipe

    def room_of(self, recipe: Recipe) -> Room:
        """The room for a changed recipe: where its blocks are not compiled, the base is smaller."""
        room = self.room
        if not self.compiled or recipe.training.compile != "none":
            return room
        base = room.base - self.compiled
        beyond = room.limit - room.base == recipe.budget.tensors
        return replace(
            room, base=base, limit=base + room.limit - room.base if beyond else room.limit
        )

    def config(self, recipe: Recipe) -> Any:
        """The shape of the model that a changed recipe would have.

        Raises:
            InputError: the forms of its layers do not go with the model, or the adapter not with
                the task.
        """
        shape = {"model": recipe.model.model_dump(), "data": recipe.data.sequence_length}
        adapter = (recipe.adapter or {}).get("method")  # which not every task takes
        parts = [shape, recipe.linear, recipe.compress, adapter]
        key = json.dumps(parts, sort_keys=True, default=str)
        if key not in self._configs:
            self._configs[key] = self.task.reconfigured(self.inputs, recipe)
        return self._configs[key]

    def without_traces(self) -> Question:
        """The same, of recipes that arithmetic knows; the others are refused."""
        return replace(self, predictor=self.predictor.without_traces())

    def choices(
        self,
        recipe: Recipe,
        ranks: int | None = None,
        kept: Mapping[str, JsonObject] | None = None,
    ) -> Iterator[Choice]:
        """Every choice that a recipe of this model leaves open; arguments as `choose.choices`."""
        check = functools.partial(self.task.check_layout, recipe, self.inputs)
        return choices(recipe, self.device, ranks or self.ranks, kept, check)

    def fitting(self, recipe: Recipe) -> Prediction | None:
        """The prediction of the plan that a changed recipe would get; None: it does not fit.

        Raises:
            InputError: its parts do not go together, or not with the model.
        """
        open_ones = self.choices(recipe)
        room = self.room_of(recipe)
        return first_that_fits(open_ones, recipe, self.config(recipe), self.predictor, room)

    def frugal(self, recipe: Recipe, ranks: int | None = None) -> Prediction:
        """The prediction of the choice that needs least.

        Raises:
            InputError: as `fitting`.
        """
        config = self.config(recipe)
        offered = list(self.choices(recipe, ranks))
        copies = min(choice.asynchronous for choice in offered)
        offered = [choice for choice in offered if choice.asynchronous == copies]
        if len(config.block_prefixes()) > 2 and any(choice.recompute for choice in offered):
            # Only where there is hardly a block to forget does running it again take more.
            offered = [choice for choice in offered if choice.recompute]
        sizes = sorted({choice.micro_batch_size for choice in offered})
        found: list[Prediction] = []
        for size in dict.fromkeys((sizes[0], sizes[-1])):
            # More at a time needs less where gradients then need not wait for other micro-batches.
            if found and found[0].ledger.bytes("gradient") < _SMALL * found[0].peak_bytes:
                break
            found += [
                self.predictor(recipe, config, choice)
                for choice in offered
                if choice.micro_batch_size == size
            ]
        return min(found, key=self.room.needed)


def changed(recipe: Recipe, change: Mapping[str, Any]) -> Recipe | None:
    """The recipe with other values of some fields; None where they do not go together."""
    try:
        return recipe.changed(**{path.replace(".", "__"): value for path, value in change.items()})
    except InputError:
        return None
