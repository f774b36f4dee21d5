"""From a recipe to a plan: every `auto` filled, the cost predicted, or what would make it fit.

Budgets are constraints. Among plans that keep them the planner changes only what leaves the
arithmetic exact: the micro-batch, then recomputation. What else would help it suggests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from modicum.core.errors import DoesNotFit, InputError, ModicumError
from modicum.core.machine import Machine, pick_device, this_machine
from modicum.core.memory import resident_bytes
from modicum.core.units import format_bytes
from modicum.planner.inputs import Inputs, look, new_config
from modicum.planner.predict import EFFICIENCY, Choice, Prediction, predict
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
    device = pick_device(recipe.training.device)
    machine = this_machine(device)
    base = resident_bytes()
    limit, limit_name = _limit(recipe, machine, device.type, base)
    if replay is not None:
        prediction = predict(recipe, inputs.config, _replayed(recipe, replay))
        choices = replay
    else:
        found = _first_that_fits(recipe, inputs, device.type, base, limit)
        if found is None:
            raise _does_not_fit(recipe, inputs, device.type, base, limit, limit_name)
        prediction = found
        choices = _explained(recipe, prediction, device.type, limit_name)
    return Plan(recipe, inputs, machine, device.type, prediction, tuple(choices), base)


def _limit(recipe: Recipe, machine: Machine, device: str, base: int) -> tuple[int, str]:
    """The bytes there are, and what to call them."""
    if recipe.budget.memory is not None:
        return recipe.budget.memory, f"budget.memory ({format_bytes(recipe.budget.memory)})"
    if device == "cpu":
        # What the process holds already is not among what is available.
        return machine.available_bytes + base, "this machine's free memory"
    return int(0.95 * (machine.accelerator_bytes or 0)), "the accelerator's memory"


def _needed(prediction: Prediction, device: str, base: int) -> int:
    return prediction.process_bytes(base) if device == "cpu" else prediction.peak_bytes


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
    recipe: Recipe, inputs: Inputs, device: str, base: int, limit: int
) -> Prediction | None:
    for choice in _choices(recipe, device):
        prediction = predict(recipe, inputs.config, choice)
        if _needed(prediction, device, base) <= limit:
            return prediction
    return None


def _smallest(recipe: Recipe, inputs: Inputs, device: str, base: int) -> int:
    """What the most frugal choice needs."""
    return min(
        _needed(predict(recipe, inputs.config, choice), device, base)
        for choice in _choices(recipe, device)
    )


def _explained(
    recipe: Recipe, prediction: Prediction, device: str, limit_name: str
) -> list[dict[str, Any]]:
    """The choices as rows for people."""
    choice, training = prediction.choice, recipe.training
    rows: list[dict[str, Any]] = []
    if training.micro_batch_size == "auto":
        if choice.micro_batch_size == training.batch_size:
            why = "the whole batch fits at once"
        elif choice == next(_choices(recipe, device)):
            why = f"{USEFUL_TOKENS[device]} tokens at a time are as fast as more"
        else:
            why = f"the largest that keeps {limit_name}"
        rows.append(
            {"field": "training.micro_batch_size", "value": choice.micro_batch_size, "why": why}
        )
    if training.recompute == "auto":
        why = "keeping activations is faster, and fits"
        if choice.recompute:
            why = f"activations of all blocks do not fit into {limit_name}"
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


def _does_not_fit(
    recipe: Recipe, inputs: Inputs, device: str, base: int, limit: int, limit_name: str
) -> DoesNotFit:
    """The refusal, with the three cheapest changes that would make it fit."""
    needed = _smallest(recipe, inputs, device, base)
    found = []
    for change, changed in _changes(recipe, inputs):
        try:
            size = _smallest(changed, _resized(inputs, changed), device, base)
        except ModicumError:
            continue
        if size <= limit:
            found.append(f"{change} (needs {format_bytes(size)})")
    # One process holds a few megabytes more than the next before it begins.
    room = -(-(needed + needed // 50) // 10**7) * 10**7
    raised = f"--set budget.memory={room // 10**6}MB"
    if recipe.budget.memory is None:
        raised = f"a machine with {format_bytes(room)} of free memory"
    what = "the process" if device == "cpu" else "its tensors"
    return DoesNotFit(
        f"does not fit {limit_name}: the most frugal plan needs {format_bytes(needed)} for {what}"
        + (f", of which {format_bytes(base)} are Python and torch" if device == "cpu" else "")
        + ". What would make it fit, cheapest first:",
        [*found[:2], raised],
    )


def _changes(recipe: Recipe, inputs: Inputs) -> Iterator[tuple[str, Recipe]]:
    """Changes to try, in the order of what they cost: exact arithmetic, numerics, method, task."""
    training, new = recipe.training, inputs.model_folder is None
    candidates: list[dict[str, Any]] = []
    if training.micro_batch_size != "auto" and training.micro_batch_size > 1:
        candidates.append({"training.micro_batch_size": "auto"})
    if training.recompute == "none":
        candidates.append({"training.recompute": "auto"})
    if training.precision == "fp32":
        candidates.append({"training.precision": "bf16"})
    if recipe.adapter is None and not new:
        candidates.append({"adapter.method": "lora"})
    if recipe.adapter is not None and recipe.adapter.get("rank", 1) > 1:
        candidates.append({"adapter.rank": max(1, recipe.adapter["rank"] // 4)})
    for divisor in (2, 4, 8):
        if recipe.data.sequence_length // divisor >= 16:
            candidates.append({"data.sequence_length": recipe.data.sequence_length // divisor})
    if new:
        for divisor in (2, 4):
            if recipe.model.vocabulary_size // divisor >= 512:
                candidates.append(
                    {"model.vocabulary_size": recipe.model.vocabulary_size // divisor}
                )
            if recipe.model.layers // divisor >= 1:
                candidates.append({"model.layers": recipe.model.layers // divisor})
    combined = [first | second for first in candidates for second in candidates if first != second]
    seen: set[str] = set()
    for change in [*candidates, *combined]:
        text = " ".join(f"--set {field}={value}" for field, value in sorted(change.items()))
        if text in seen:
            continue
        seen.add(text)
        try:
            changed = recipe.changed(**{f.replace(".", "__"): v for f, v in change.items()})
        except InputError:
            continue
        yield text, changed


def _resized(inputs: Inputs, recipe: Recipe) -> Inputs:
    """Inputs with the model that a changed recipe would have."""
    if inputs.model_folder is not None:
        return inputs
    config = new_config(recipe)
    if inputs.tokenizer is not None:
        config = replace(config, vocabulary_size=inputs.config.vocabulary_size)
    return replace(inputs, config=config)
