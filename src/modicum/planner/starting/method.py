"""What is trained: all weights where they fit, else an adapter, else one on a 4-bit base.

The planner is asked, not guessed: each candidate is a recipe, and the first that keeps the budget
is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from modicum.core.errors import InputError
from modicum.core.machine import pick_device
from modicum.core.machine.rate import shared_machine
from modicum.core.machine.record import machine_record
from modicum.core.units import format_bytes
from modicum.models.traced_cache import ending_traces
from modicum.planner.choose import Room, Share
from modicum.planner.precision import settled
from modicum.planner.predict import Predictor
from modicum.planner.question import Question, map_as
from modicum.planner.starting.draft import Draft
from modicum.recipe import Recipe, methods_for
from modicum.tasks import Inputs, task_of

FULL, USUAL = "full", "lora"
_QUANTIZED = "nf4"


@dataclass(frozen=True)
class Candidate:
    """Settings of a way to train, and what people call it."""

    name: str
    settings: Mapping[str, Any]
    adapter: str | None


def check_method(method: str | None, model: str | None) -> None:
    """Refuse a method that is none, or that the model does not allow.

    Raises:
        InputError: with what is allowed.
    """
    known = (FULL, *methods_for("adapter"))
    if method is not None and method not in known:
        raise InputError(
            "is neither `full` nor an adapter",
            field="--method",
            value=method,
            allowed=", ".join(known),
            candidates=known,
        )
    if method not in (None, FULL) and model is None:
        raise InputError(
            "an adapter changes a trained model, and there is none; name one with --model",
            field="--method",
            value=method,
        )


def candidates(method: str | None) -> Iterator[Candidate]:
    """The ways to train that may be taken, the one that changes most first."""
    if method in (None, FULL):
        yield Candidate("full training", {}, None)
    if method != FULL:
        name = method or USUAL
        adapter = {"adapter.method": name}
        yield Candidate(name, adapter, name)
        yield Candidate(f"{name} on a 4-bit base", adapter | {"linear.method": _QUANTIZED}, name)


@ending_traces()
def choose_method(
    draft: Draft, inputs: Inputs, method: str | None, dtype: str | None
) -> str | None:
    """Set what is trained, and in which precision; the adapter's name, None for full training.

    Raises:
        InputError: none of the ways goes with the model.
    """
    needs = LeastBytes(draft.recipe(), inputs)
    tried: list[tuple[Candidate, int]] = []
    refused: InputError | None = None
    for candidate in candidates(method):
        precision, _ = _precision(candidate, needs.device, dtype)
        more = {"training.precision": precision, **candidate.settings, **draft.asked}
        try:
            bytes_ = needs(
                draft.recipe(**{name.replace(".", "__"): value for name, value in more.items()})
            )
        except InputError as error:
            refused = error
            continue
        tried.append((candidate, bytes_))
        if bytes_ <= needs.room.limit:
            break
    if not tried:
        assert refused is not None
        raise refused
    _set(draft, tried, needs.room, dtype, asked=method is not None)
    return tried[-1][0].adapter


def _set(
    draft: Draft,
    tried: list[tuple[Candidate, int]],
    room: Room,
    dtype: str | None,
    *,
    asked: bool,
) -> None:
    taken, _ = tried[-1]
    too_large = "; ".join(f"{each.name} needs {format_bytes(size)}" for each, size in tried[:-1])
    why = f"{too_large}, and there is {room.name}" if too_large else ""
    if taken.adapter is not None:
        draft.set("adapter.method", taken.adapter, "as asked for" if asked else why)
        fields = methods_for("adapter")[taken.adapter].model.model_fields
        if (rank := fields.get("rank")) is not None and isinstance(rank.default, int):
            draft.set("adapter.rank", rank.default, "the width of its factors: its default")
    if "linear.method" in taken.settings:
        draft.set("linear.method", _QUANTIZED, f"a 4-bit base: {why}")
    draft.set("training.precision", *_precision(taken, room.device, dtype))


def _precision(taken: Candidate, device: str, dtype: str | None) -> tuple[str, str]:
    """What products are computed in, and why."""
    if "linear.method" in taken.settings:
        return "bf16", "what a 4-bit base computes in"
    if device != "cpu":
        return "bf16", "faster on an accelerator"
    if taken.adapter is not None and dtype == "BF16":
        return "bf16", "the frozen weights are stored in BF16, and stay so"
    if taken.adapter is not None and dtype == "F16":
        return "auto", "the frozen weights are stored in F16, and stay so; products are exact"
    return "fp32", "exact, on a processor"


class LeastBytes:
    """The bytes that a recipe of the same model and data needs at its most frugal.

    Args:
        recipe: with the budget and the device.
    """

    def __init__(self, recipe: Recipe, inputs: Inputs) -> None:
        device = pick_device(recipe.training.device)
        self.device = device.type
        map_as(recipe, self.device)
        machine = shared_machine(device)
        record = machine_record(self.device).of_run(inputs.reads)
        # Who states a budget may mean another machine than the one that writes the recipe.
        self.room = Room.of(recipe, machine, self.device, record, Share(), elsewhere=True)
        task = task_of(recipe)
        self._asked = Question(
            recipe,
            task,
            inputs,
            self.device,
            machine,
            record,
            self.room,
            Predictor(self.device, dense=partial(task.uncompressed, inputs=inputs)),
        )

    def __call__(self, recipe: Recipe) -> int:
        """Of a recipe, whose frozen weights are held as a run holds them."""
        recipe, _ = settled(recipe, self._asked.inputs.dtypes)
        return self.room.needed(self._asked.frugal(recipe))
