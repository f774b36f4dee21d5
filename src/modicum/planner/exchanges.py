"""What a step would take with each way to exchange gradients, on the link that was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from modicum.comm.base import MatrixMethod, Schedule
from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.core.machine import Machine
from modicum.core.machine.links import MeasuredLink
from modicum.core.machine.record import MachineRecord
from modicum.core.ranks.environment import ranks_on_a_host
from modicum.core.ranks.layout import Layout
from modicum.parallel.fsdp_wires import calls_travel
from modicum.planner.choose import refused, traits_of
from modicum.planner.coding_time import coding_seconds
from modicum.planner.predict import Predictor
from modicum.planner.prediction import Prediction
from modicum.planner.wire_time import WireQuery, break_even, wire_time
from modicum.recipe import Recipe
from modicum.tasks import Inputs

# From what is exact to what is not: numbers as they are, when they travel, in 16 bits, 4, fewer.
CANDIDATES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"method": "dear"},
    {"method": "dense_sums", "dtype": "bf16"},
    {"method": "sdp4bit"},
    {"method": "acp_sgd"},
    {"method": "powersgd"},
)
# A section `comm`, or None; and what is predicted of the recipe that has it.
TriedWay = tuple[dict[str, Any] | None, Prediction, Recipe]


class ExchangeQuestion(Protocol):
    """What a way to exchange gradients is tried on: a recipe, its model, and a machine."""

    @property
    def recipe(self) -> Recipe:
        """As it would run."""

    @property
    def inputs(self) -> Inputs:
        """The model's shape among them."""

    @property
    def machine(self) -> Machine:
        """How fast it is."""

    @property
    def record(self) -> MachineRecord:
        """What of that a step reaches."""

    @property
    def device(self) -> str:
        """Where the run would be, cpu or cuda."""

    @property
    def predictor(self) -> Predictor:
        """Predicts what a step takes."""


def wire_query(recipe: Recipe, prediction: Prediction, device: str, rate: float) -> WireQuery:
    """An update's calls as `wire_time` is asked for them.

    Args:
        rate: operations a second that a step reaches.
    """
    comm, choice, late = recipe.method("comm"), prediction.choice, 0.0
    # Who says which ranks an exchange is to take for a host says it of its hops too.
    stated = getattr(comm, "ranks_per_node", None) or ranks_on_a_host(choice.layout.ranks)
    wires, updates = prediction.ledger.wire, prediction.update_wires
    passing = wires[: len(wires) - len(updates)]
    if isinstance(comm, MatrixMethod):
        late = comm.late_part(max(1, sum(w.count for w in passing if w.collective == "all_reduce")))
    return WireQuery(
        passing,
        choice.layout,
        (prediction.flops + prediction.coding_flops) / rate + coding_seconds(wires, device),
        choice.micro_batches,
        device,
        isinstance(comm, Schedule),
        late,
        _waits(recipe, choice.layout),
        2 if recipe.parallel.reshard_after_forward else 1,
        min(stated, choice.layout.ranks),
        isinstance(comm, MatrixMethod) and comm.sums_matrices_on_rows,
        updates,
    )


def _waits(recipe: Recipe, layout: Layout) -> list[Literal["gathers", "sums"]]:
    """Which of FSDP2's calls on a CPU are waited for where they are asked for."""
    if layout.copies or layout.shards == 1:
        return []
    if not calls_travel():
        return ["gathers", "sums"]
    found: list[Literal["gathers", "sums"]] = []
    comm = recipe.method("comm")
    if comm is not None and not isinstance(comm, MatrixMethod):
        found.append("gathers")  # which it codes
    made_by = recipe.methods()["optimizer"].traits(recipe.fields("optimizer"))
    if layout.replicas > 1 or "frees_gradient_in_backward" in made_by:
        found.append("sums")
    return found


def exchanges(
    asked: ExchangeQuestion,
    made: Prediction,
    link: MeasuredLink,
    candidates: Sequence[dict[str, Any] | None] = CANDIDATES,
) -> list[JsonObject]:
    """Each way that goes with the plan's layout, with its step, bytes, and where it pays."""
    return step_rows(asked, tried(asked, made, candidates), link)


def step_rows(
    asked: ExchangeQuestion, ways: Iterable[TriedWay], link: MeasuredLink
) -> list[JsonObject]:
    """Ways to exchange gradients with their step, bytes, and where they pay.

    `step_seconds` of an update, of them `waited_seconds` for the wire; `bytes` that a rank sends;
    `break_even`: the rate in bytes a second below which it is faster than numbers as they are, null
    where it is so at no rate; `here`: whether it is what the recipe has.
    """
    found: list[tuple[dict[str, Any] | None, WireQuery, int]] = []
    for fields, prediction, recipe in ways:
        rate = asked.machine.flops * asked.record.efficiency_in(half=prediction.half)
        at = wire_query(recipe, prediction, asked.device, rate)
        found.append((fields, at, prediction.wire_bytes))
    plain = next((at for fields, at, _ in found if fields is None), None)
    rows = []
    for fields, at, sent in found:
        waited = wire_time(at, link).waited
        below = None if plain is None or fields is None else break_even(plain, at, link)
        rows.append(
            {
                "comm": fields,
                "step_seconds": at.compute + waited,
                "waited_seconds": waited,
                "bytes": sent,
                "break_even": None if below is None or math.isinf(below) else below,
                "always": below is not None and math.isinf(below),
                "here": fields == asked.recipe.comm,
            }
        )
    return rows


def _with_own(
    ways: Sequence[dict[str, Any] | None], own: dict[str, Any] | None
) -> list[dict[str, Any] | None]:
    """Ways with the recipe's own fields for its method, at its place, as they stand in an order.

    >>> _with_own([None, {"method": "a"}, {"method": "b"}], {"method": "a", "rank": 4})
    [None, {'method': 'a', 'rank': 4}, {'method': 'b'}]
    """
    if own is None or own in ways:
        return list(ways)
    names = [None if each is None else each["method"] for each in ways]
    place = names.index(own["method"]) if own["method"] in names else len(ways)
    others = [
        each if name != own["method"] else None
        for name, each in zip(names[place + 1 :], ways[place + 1 :], strict=True)
    ]
    return [*ways[:place], own, *filter(None, others)]


def tried(
    asked: ExchangeQuestion, made: Prediction, ways: Sequence[dict[str, Any] | None]
) -> Iterator[TriedWay]:
    """Those that go with the plan's layout, the recipe's own among them, in it."""
    for fields in _with_own(ways, asked.recipe.comm):
        recipe = asked.recipe.model_copy(update={"comm": fields})
        if fields is not None and fields != asked.recipe.comm:
            try:
                recipe = asked.recipe.changed(comm=fields)
            except InputError:
                continue
        if refused(recipe, traits_of(recipe, made.choice)) is not None:
            continue
        yield fields, asked.predictor(recipe, asked.inputs.config, made.choice), recipe
