"""From a recipe to a plan: every `auto` filled, the cost predicted, or what would make it fit.

Budgets are constraints. Among plans that keep them the planner changes only what leaves the
arithmetic exact: the micro-batch, then recomputation. What else would help it suggests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import torch

from modicum.core.errors import DoesNotFit, InputError
from modicum.core.machine import Machine, pick_device, this_machine
from modicum.core.memory import resident_bytes
from modicum.core.units import format_bytes
from modicum.models.config import ModelConfig
from modicum.planner.inputs import Inputs, look, new_config
from modicum.planner.predict import EFFICIENCY, Choice, Prediction, Predictor, predict
from modicum.planner.remedies import Remedy, remedies
from modicum.recipe import Recipe

# A larger micro-batch than this many tokens makes no machine faster that was measured.
USEFUL_TOKENS = {"cpu": 4096, "cuda": 32768}


@dataclass(frozen=True)
class Plan:
    """A recipe with every choice made, and what it will cost.

    Attributes:
        choices: what was `auto`, with the value and why; replayed when a run is resumed.
        prediction: bytes and work of an update.
        process_base: bytes that the process held when the plan was made.
        revision: 1 for the first; a run adds others when it learns more.
    """

    recipe: Recipe
    inputs: Inputs
    machine: Machine
    device: str
    prediction: Prediction
    choices: tuple[dict[str, Any], ...]
    process_base: int
    revision: int = 1
    why: str = "first plan"
    measured_tokens_per_second: float | None = None
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def process_bytes(self) -> int | None:
        """The process's predicted resident size; None on an accelerator, where tensors count."""
        if self.device != "cpu":
            return None
        return self.prediction.process_bytes(self.process_base)

    @property
    def tokens_per_update(self) -> int:
        """Positions in an update; the trained ones are fewer where prompts or ends are not."""
        return self.recipe.training.batch_size * self.recipe.data.sequence_length

    @property
    def tokens_per_second(self) -> float:
        """Measured in this run, else estimated from the machine's rate."""
        if self.measured_tokens_per_second is not None:
            return self.measured_tokens_per_second
        return self.tokens_per_update * self.machine.flops * EFFICIENCY / self.prediction.flops

    def row(self) -> dict[str, Any]:
        """The plan's line in `plan.jsonl`."""
        ledger, recipe = self.prediction.ledger, self.recipe
        rate = self.tokens_per_second
        return {
            "revision": self.revision,
            "when": self.when,
            "why": self.why,
            "choices": list(self.choices),
            "prediction": {
                "peak_bytes": self.prediction.peak_bytes,
                "process_bytes": self.process_bytes,
                "budget_bytes": recipe.budget.memory,
                "table": ledger.table(),
                "by_phase": ledger.by_phase(),
                "tokens_per_second": rate,
                "seconds": recipe.training.steps * self.tokens_per_update / rate,
            },
            "parameters": {
                "total": self.prediction.total,
                "trainable": self.prediction.trainable,
            },
            "tokens_per_update": self.tokens_per_update,
            "device": self.device,
            "data": self.inputs.source.describe(),
        }

    def replaying(self, rows: Sequence[Mapping[str, Any]]) -> Plan:
        """This plan with the choices of the last of a run's `rows`, which it goes on from."""
        if not rows:
            return self
        choices = rows[-1]["choices"]
        prediction = predict(self.recipe, self.inputs.config, _replayed(self.recipe, choices))
        return replace(
            self,
            prediction=prediction,
            choices=tuple(choices),
            revision=rows[-1]["revision"],
            why=rows[-1]["why"],
        )

    def revised(self, why: str, tokens_per_second: float) -> Plan:
        """The next revision, with a speed that was measured."""
        return replace(
            self,
            revision=self.revision + 1,
            why=why,
            measured_tokens_per_second=tokens_per_second,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def plan(recipe: Recipe, *, replay: list[dict[str, Any]] | None = None) -> Plan:
    """Look at the inputs, predict, and choose what the recipe leaves open.

    Args:
        recipe: what the user wants.
        replay: choices of an earlier plan, which are kept instead of made anew.

    Raises:
        InputError: something about the model or the data is wrong.
        DoesNotFit: no choice keeps the budget; with the three cheapest changes that would.

    >>> import modicum
    >>> recipe = modicum.Recipe(data={"include": ["json/**"]}, model={"layers": 2, "width": 64})
    >>> modicum.plan(recipe).prediction.trainable
    368960
    """
    inputs = look(recipe)
    device = _device(recipe, replay)
    machine = this_machine(device)
    base, predictor = resident_bytes(), Predictor()
    if replay is not None:
        prediction = predictor(recipe, inputs.config, _replayed(recipe, replay))
        choices = replay
    else:
        room = _Room.of(recipe, machine, device.type, base)
        found = _first_that_fits(recipe, inputs, predictor, room)
        if found is None:
            raise _does_not_fit(recipe, inputs, predictor, room)
        prediction = found
        choices = _explained(recipe, prediction, room)
    return Plan(recipe, inputs, machine, device.type, prediction, tuple(choices), base)


@dataclass(frozen=True)
class _Room:
    """The bytes that a run may take on a device, and what to call them.

    `base` is what the process holds already; `most`, what a larger budget could be on this machine.
    """

    device: str
    base: int
    limit: int
    name: str
    most: int

    @classmethod
    def of(cls, recipe: Recipe, machine: Machine, device: str, base: int) -> _Room:
        if device == "cpu":
            # What the process holds already is not among what is available.
            most, name = machine.available_bytes + base, "this machine's free memory"
        else:
            most, name = int(0.95 * (machine.accelerator_bytes or 0)), "the accelerator's memory"
        if (budget := recipe.budget.memory) is not None:
            return cls(device, base, budget, f"budget.memory ({format_bytes(budget)})", most)
        return cls(device, base, most, f"{name} ({format_bytes(most)})", most)

    def needed(self, prediction: Prediction) -> int:
        """The bytes of a prediction that count here."""
        if self.device == "cpu":
            return prediction.process_bytes(self.base)
        return prediction.peak_bytes


def _device(recipe: Recipe, replay: list[dict[str, Any]] | None) -> torch.device:
    """The device that the recipe asks for; one chosen earlier is kept where it is still there.

    Raises:
        InputError: the recipe asks for CUDA, and there is none.
    """
    wanted = recipe.training.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "there is no CUDA device here", field="training.device", value=wanted, allowed="cpu"
        )
    told = {row["field"]: row["value"] for row in replay or ()}.get("training.device", wanted)
    return pick_device(told if torch.cuda.is_available() else "cpu")


def _choices(recipe: Recipe, device: str) -> Iterator[Choice]:
    """Every choice that the recipe leaves open, the fastest first."""
    training = recipe.training
    batch, micro = training.batch_size, training.micro_batch_size
    if micro == "auto":
        useful = max(1, USEFUL_TOKENS[device] // recipe.data.sequence_length)
        counts = {-(-batch // size) for size in range(1, min(batch, useful) + 1)}
        sizes = sorted({-(-batch // count) for count in counts}, reverse=True)
    else:
        sizes = [micro]
    recomputes = {"auto": (False, True), "none": (False,), "blocks": (True,)}
    for recompute in recomputes[training.recompute]:
        for size in sizes:
            yield Choice(size, -(-batch // size), recompute)


def _first_that_fits(
    recipe: Recipe, inputs: Inputs, predictor: Predictor, room: _Room
) -> Prediction | None:
    for choice in _choices(recipe, room.device):
        prediction = predictor(recipe, inputs.config, choice)
        if room.needed(prediction) <= room.limit:
            return prediction
    return None


def _smallest(recipe: Recipe, config: ModelConfig, predictor: Predictor, room: _Room) -> int:
    """What the most frugal choice needs: of micro-batches, the largest one or the smallest."""
    choices = list(_choices(recipe, room.device))
    sizes = {choice.micro_batch_size for choice in choices}
    return min(
        room.needed(predictor(recipe, config, choice))
        for choice in choices
        if choice.micro_batch_size in (min(sizes), max(sizes))
    )


def _explained(recipe: Recipe, prediction: Prediction, room: _Room) -> list[dict[str, Any]]:
    """The choices as rows for people."""
    choice, training, device = prediction.choice, recipe.training, room.device
    rows: list[dict[str, Any]] = []
    if training.micro_batch_size == "auto":
        if choice.micro_batch_size == training.batch_size:
            why = "the whole batch fits at once"
        elif choice.micro_batch_size == next(_choices(recipe, device)).micro_batch_size:
            why = f"{USEFUL_TOKENS[device]} tokens at a time are as fast as more"
        else:
            why = f"the largest that keeps {room.name}"
        rows.append(
            {"field": "training.micro_batch_size", "value": choice.micro_batch_size, "why": why}
        )
    if training.recompute == "auto":
        why = "keeping activations is faster, and fits"
        if choice.recompute:
            why = f"activations of all blocks do not fit into {room.name}"
        value = "blocks" if choice.recompute else "none"
        rows.append({"field": "training.recompute", "value": value, "why": why})
    if training.device == "auto":
        why = "CUDA is there" if device == "cuda" else "no accelerator is there"
        rows.append({"field": "training.device", "value": device, "why": why})
    return rows


def _replayed(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> Choice:
    """The choice that an earlier plan's rows tell of."""
    told = {row["field"]: row["value"] for row in rows}
    training = recipe.training
    size = told.get("training.micro_batch_size", training.micro_batch_size)
    recompute = told.get("training.recompute", training.recompute)
    return Choice(int(size), -(-training.batch_size // int(size)), recompute == "blocks")


def _does_not_fit(recipe: Recipe, inputs: Inputs, predictor: Predictor, room: _Room) -> DoesNotFit:
    """The refusal, with the three cheapest changes that would make it fit."""

    def needs(changed: Recipe) -> int:
        return _smallest(changed, _config(inputs, changed), predictor, room)

    needed = needs(recipe)
    found = list(islice(remedies(recipe, needs, room.limit), 3))
    budget = -(-needed * 102 // 10**9) * 10**7  # the next process may begin a little larger
    if len(found) < 3 and recipe.budget.memory is not None and budget <= room.most:
        found.append(Remedy({"budget.memory": f"{budget // 10**6}MB"}, needed))
    what = "the process" if room.device == "cpu" else "its tensors"
    own = f", of which {format_bytes(room.base)} are Python and torch"
    return DoesNotFit(
        f"does not fit {room.name}: the most frugal plan needs {format_bytes(needed)} for {what}"
        + (own if room.device == "cpu" else "")
        + (". What would make it fit, cheapest first:" if found else ", and no change is enough"),
        [f"{remedy.words} (needs {format_bytes(remedy.needs)})" for remedy in found],
    )


def _config(inputs: Inputs, recipe: Recipe) -> ModelConfig:
    """The configuration of the model that a changed recipe would have."""
    if inputs.model_folder is not None:
        return inputs.config
    config = new_config(recipe)
    if inputs.tokenizer is not None:
        config = replace(config, vocabulary_size=inputs.config.vocabulary_size)
    return config
