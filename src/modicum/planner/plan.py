"""A plan: a recipe with every choice made, its cost, and what a run makes of it as it learns more.

`planning` makes the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from modicum.core.contracts.surgery import Surgery
from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.core.machine import Machine
from modicum.core.machine.links import MeasuredLink
from modicum.core.machine.record import MachineRecord
from modicum.core.units import Every
from modicum.planner.choose import MICRO, choice_of
from modicum.planner.exchanges import wire_query
from modicum.planner.explained import PRODUCT, planned_positions, product_rows
from modicum.planner.length import Derived, RunLength, derived
from modicum.planner.plan_row import plan_row
from modicum.planner.predict import predict
from modicum.planner.prediction import Prediction
from modicum.planner.profiles import Profile
from modicum.planner.resuming import carried, same_start
from modicum.planner.save_interval import EVERY, FIRST
from modicum.planner.shown import plan_html
from modicum.planner.uses import Use
from modicum.planner.wire_time import WireQuery, WireTime, wire_time
from modicum.recipe import Recipe
from modicum.tasks import AnyTask, Inputs

_FASTER = 1.25  # so much faster in fp32, and a plan says it


@dataclass(frozen=True)
class Plan:
    """A recipe with every choice made, and what it will cost.

    Attributes:
        choices: what was `auto`, with the value and why; replayed when a run is resumed.
        prediction: bytes and work of an update.
        process_base: bytes that the process holds before the first tensor: Python, torch, and all
            that a run loads.
        record: what was measured of the machine.
        revision: 1 for the first; a run adds others when it learns more.
        surgeries: what has changed the shapes of `inputs.config`, in order.
        ended: sections of the recipe whose methods have ended for good, and spend nothing.
        counts: of the data, `rows` and what else the task counts; `exact` once it is prepared.
        profile: where the machine's figures are from, if not from the machine that we are on.
        uses: what the room that is left could be spent on.
        link: between the ranks, where it was measured or stated.
        exchanges: what a step would take with each way to exchange gradients.
        advice: which other adapters the prediction speaks for.
        prepared: by layer, what the adapter found out from data; empty before.
        compressed: whether `inputs` have the model that the recipe's compressor has left.
        loaded_last: bytes of `process_base` that are loaded for the first update alone.
    """

    recipe: Recipe
    task: AnyTask
    inputs: Inputs
    machine: Machine
    device: str
    prediction: Prediction
    choices: tuple[dict[str, Any], ...]
    process_base: int
    record: MachineRecord
    revision: int = 1
    why: str = "first plan"
    measured_tokens_per_second: float | None = None
    surgeries: tuple[Surgery, ...] = ()
    ended: tuple[str, ...] = ()
    counts: Mapping[str, Any] = field(default_factory=dict)
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    profile: Profile | None = None
    uses: tuple[Use, ...] = ()
    advice: tuple[JsonObject, ...] = ()
    prepared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    link: MeasuredLink | None = None
    exchanges: tuple[JsonObject, ...] = ()
    compressed: bool = False
    loaded_last: int = 0

    @property
    def counts_the_most(self) -> bool:
        """Whether weights will say which sizes layers get, so that their largest are counted."""
        method = None if self.compressed else self.recipe.methods().get("compress")
        fields = self.recipe.fields("compress") if method is not None else {}
        return method is not None and "plans_from_weights" in method.traits(fields)

    @property
    def process_bytes(self) -> int | None:
        """The process's predicted resident size; None on an accelerator, where tensors count.

        With what the allocator was seen to keep on average, and with a copy of the state where a
        checkpoint is written before the last update.
        """
        if self.device != "cpu":
            return None
        return self._process(0.5, staged=self._saves_on_the_way)

    def _process(self, place: float, *, staged: bool = True) -> int:
        """With what the allocator keeps at a place between the least, 0, and the most, 1."""
        again = self.prediction.choice.recompute
        kept, before = (
            least + place * (most - least)
            for least, most in (self.record.kept_where(recompute=again), self.record.kept)
        )
        return max(
            self.prediction.process_bytes(self.process_base, kept, staged=staged),
            self.prediction.process_before(self.process_base - self.loaded_last, before),
        )

    @property
    def _saves_on_the_way(self) -> bool:
        """Whether a checkpoint is written while training continues, as far as can be foreseen."""
        every = self.saving
        if every.steps is not None:
            return every.steps < self.steps
        return every.seconds is not None and every.seconds < self.seconds

    @property
    def saving(self) -> Every:
        """How often the run is saved: as its recipe says, or as it was found to be best."""
        asked = self.recipe.checkpoint.every
        found = {row["field"]: row["value"] for row in self.choices}.get(EVERY, FIRST)
        return Every.parse(found if asked == "auto" else asked)

    @property
    def process_range(self) -> tuple[int, int] | None:
        """Between what and what.

        Allocators keep more next to some tensors than to others, and a checkpoint may be written
        before the next peak or still be under way then.
        """
        if self.device != "cpu":
            return None
        return self._process(0.0, staged=False), self._process(1.0)

    @property
    def budget(self) -> int | None:
        """What the process may hold, or on an accelerator its tensors; None: no limit was set."""
        asked = self.recipe.budget
        base = self.process_base if self.device == "cpu" else 0
        limits = [asked.memory, None if asked.tensors is None else asked.tensors + base]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def steps(self) -> int:
        """Updates of the run: as asked for, or as many as the epochs or the tokens need.

        Raises:
            InputError: epochs are asked for, and the task does not say how many rows it has.
        """
        return self.length.steps

    @property
    def length(self) -> RunLength:
        """The same, with the updates in which the learning rate rises, and falls at the end.

        Raises:
            InputError: as `steps`.
        """
        return RunLength.of(self.recipe.training, self.tokens_per_update, self.rows)

    @property
    def derived(self) -> dict[str, Derived]:
        """What of the length the recipe gives in other fields than in steps, and how."""
        return derived(self.recipe.training, self.tokens_per_update, self.rows)

    @property
    def epochs(self) -> float | None:
        """How often the rows are gone through; None where it is not known how many there are."""
        rows = self.rows
        return self.steps * self.recipe.training.batch_size / rows if rows else None

    @property
    def rows(self) -> int | None:
        """Of the data, where they were counted."""
        rows: int | None = self.counts.get("rows")
        return rows

    @property
    def tokens_per_update(self) -> int:
        """Positions in an update: prompts and padding take as long as what is trained.

        Speed is counted in them, here and in what a run measures.
        """
        return self.recipe.training.batch_size * self.task.row(self.recipe).positions

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks: measured in this run, else estimated from a rank's rate.

        The estimate leaves out what ranks wait for the wire where no link was measured or stated.
        """
        if self.measured_tokens_per_second is not None:
            return self.measured_tokens_per_second
        known = self.wire_time
        waited = 0.0 if known is None else known.waited
        return self.tokens_per_update / (self._wire_query.compute + waited)

    @property
    def _rate(self) -> float:
        """Operations a second that a rank's step reaches."""
        return self.machine.flops * self.record.efficiency_in(half=self.prediction.half)

    @property
    def _wire_query(self) -> WireQuery:
        return wire_query(self.recipe, self.prediction, self.device, self._rate)

    @property
    def wire_time(self) -> WireTime | None:
        """What an update's calls take, and what of it a step waits for; None: no link is known."""
        return None if self.link is None else wire_time(self._wire_query, self.link)

    @property
    def seconds(self) -> float:
        """Of all updates together."""
        return self.steps * self.tokens_per_update / self.tokens_per_second

    @property
    def seconds_in_fp32(self) -> float | None:
        """Of all updates in fp32, where the machine computes that faster than bf16; else None.

        A processor without instructions for bf16 takes ten times as long in it.
        """
        record = self.record
        faster = record.efficiency_in(half=False) / record.efficiency_in(half=True)
        return self.seconds / faster if self.prediction.half and faster > _FASTER else None

    @property
    def ranks(self) -> int:
        """How many ranks it is for."""
        return self.prediction.choice.layout.ranks

    def row(self) -> dict[str, Any]:
        """The plan's line in `plan.jsonl`."""
        return plan_row(self)

    def _repr_html_(self) -> str:
        return plan_html(self.row())

    def replaying(self, rows: Sequence[Mapping[str, Any]]) -> Plan:
        """This plan as the continuation of a run that has `rows` of plans.

        Choices of the last one are kept. Where the ranks are others, or what is asked of them, that
        is a new revision, which keeps what the run has learnt.
        """
        if not rows:
            return self
        last = rows[-1]
        if same_start(self.recipe, self.ranks, last):
            made = self.with_choices(last["choices"])
            return replace(made, revision=last["revision"], why=last["why"])
        kept = {row["field"]: row for row in carried(rows)}
        choices = [row for row in self.choices if row["field"] not in kept]
        if MICRO in kept:
            size = min(kept[MICRO]["most"], self.prediction.choice.micro_batch_size)
            kept[MICRO] = {**kept[MICRO], "value": size}
        why = f"resumes with {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if last.get("ranks", 1) == self.ranks:
            why = "resumes with other settings of parallel or checkpoint"
        made = self.with_choices([*kept.values(), *choices])
        return replace(made, revision=last["revision"] + 1, why=why)

    def counted(self, counts: Mapping[str, Any]) -> Plan:
        """This plan, now that the data is prepared; what is streamed is counted by nobody."""
        if counts.get("streamed"):
            return self
        return replace(self, counts={**counts, "exact": True})

    def with_prepared(self, values: Mapping[str, Mapping[str, Any]]) -> Plan:
        """This plan, now that the adapter has found out from data what each layer gets."""
        made = replace(self, prepared=values).with_choices(self.choices)
        if planned_positions(self.choices) != made.prediction.positions:
            return made
        others = [row for row in self.choices if row["field"] != PRODUCT]
        return replace(made, choices=(*others, *product_rows(made.prediction)))

    def because(self, why: str) -> Plan:
        """The next revision, for a reason that chooses nothing."""
        return self._next(why)

    def chosen(self, name: str, value: Any, why: str) -> Plan:
        """The next revision, in which a field has a value that the run has found to be right.

        A micro-batch that was made smaller stays a limit when a later start plans anew.
        """
        row: JsonObject = {"field": name, "value": value, "why": why}
        if name == MICRO:
            row["most"] = value
        others = [other for other in self.choices if other["field"] != name]
        return self.with_choices([*others, row])._next(why)

    def with_choices(self, rows: Iterable[JsonObject]) -> Plan:
        """The plan with these choices, and what they cost."""
        rows = tuple(rows)
        choice = choice_of(self.recipe, rows, self.ranks)
        left = self.recipe.model_copy(update=dict.fromkeys(self.ended))
        dense = None if self.compressed else partial(self.task.uncompressed, inputs=self.inputs)
        config = self.inputs.config
        prediction = predict(left, config, choice, self.device, self.prepared, dense=dense)
        if self.compressed:  # which took what was foreseen
            prediction = replace(prediction, before=self.prediction.before)
        return replace(self, prediction=prediction, choices=rows)

    def without(self, section: str) -> Plan:
        """The plan of a run in which the method of a section has ended for good.

        Raises:
            InputError: the recipe has no method there.
        """
        if section not in self.recipe.methods():
            problem = "says that a method has ended which the recipe does not have"
            raise InputError(problem, field="ended.section", value=section)
        return replace(self, ended=(*self.ended, section)).with_choices(self.choices)

    def ended_after(self, section: str, step: int, why: str) -> Plan:
        """The next revision, by which a section's method spends nothing after update `step`."""
        name = self.recipe.methods()[section].name
        return self.without(section)._next(f"after step {step}: {name} has ended, as {why}")

    def reshaped(self, surgery: Surgery) -> Plan:
        """The plan of a run whose layers have changed by this, and what it costs from there on.

        Raises:
            InputError: the maps do not lead from the shapes of the model to those of the changed.
        """
        before = self.inputs.config
        after = self.task.reshaped(before, surgery)
        surgery.check(before.parameter_shapes(), after.parameter_shapes())
        inputs = replace(self.inputs, config=after)
        changed = replace(self, inputs=inputs, surgeries=(*self.surgeries, surgery))
        return changed.with_choices(self.choices)

    def operated(self, surgery: Surgery, step: int) -> Plan:
        """The next revision, by which layers have other shapes after update number `step`.

        Raises:
            InputError: as `reshaped`.
        """
        return self.reshaped(surgery)._next(f"after step {step}: {surgery.why}")

    def _next(self, why: str) -> Plan:
        return replace(
            self,
            revision=self.revision + 1,
            why=why,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def revised(self, why: str, tokens_per_second: float) -> Plan:
        """The next revision, with a speed that was measured."""
        return replace(self._next(why), measured_tokens_per_second=tokens_per_second)
