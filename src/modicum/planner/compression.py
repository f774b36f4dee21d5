"""What a run takes before its first update, where it begins by making its model smaller."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from modicum.compress.base import Compressor, Making
from modicum.core.contracts.ledger import ALWAYS, Entry, Ledger, Phase
from modicum.core.errors import InputError
from modicum.core.layers.meta import on_meta
from modicum.planner.prediction import Choice, Prediction
from modicum.recipe import Recipe
from modicum.tasks import task_of

# A pass that notes what layers are given keeps what the smallest adapter on them keeps.
_WATCH = {"method": "lora", "rank": 1}
_NEITHER = ("compress", "linear", "memory", "comm")
_COMES_AND_GOES = ("activation", "workspace")
_PASS: tuple[Phase, ...] = ("forward", "loss", "backward")


def compression_ledger(
    recipe: Recipe,
    compressor: Compressor,
    dense: Any,
    choice: Choice,
    predicted: Callable[[Recipe, Any, Choice], Prediction],
) -> Ledger:
    """The dense model, and next to it a pass over data or the fit of a layer, of each rank.

    Args:
        dense: the configuration of the model before it is compressed.
        choice: whose micro-batches the pass takes.
        predicted: gives what another recipe takes.
    """
    with on_meta():
        model = task_of(recipe).model(dense)
    size, item = min(choice.micro_batch_size, compressor.examples), 2 if held_in_half(recipe) else 4
    weights = [parameter.numel() * item for parameter in model.parameters()]
    row = task_of(recipe).row(recipe)
    needs = compressor.making(model, replace(row, sequences=size, weight_bytes=item))
    whole = Entry("weight", sum(weights), ALWAYS, "model before it is compressed")
    found = Ledger.of(
        whole.in_tensors(weights),
        Entry("workspace", needs.fitting, ("step",), "one layer's decomposition").in_one(),
        Entry("workspace", needs.sums, _PASS, "what is noted of layers"),
        Entry("workspace", needs.noting, ("loss", "backward"), "what one layer was given"),
    )
    if needs.passes != "none":
        ledger = _pass(recipe, needs, dense, Choice(size, 1, recompute=False), predicted)
        ledger = ledger if needs.passes == "backward" else ledger.without_backward()
        found += Ledger(tuple(entry for entry in ledger.entries if entry.kind in _COMES_AND_GOES))
    return found


def known_by(recipe: Recipe, choice: Choice) -> str:
    """What of a recipe and a choice `compression_ledger` depends on, as text."""
    sections = (recipe.task, recipe.model, recipe.data, recipe.compress, recipe.plugins)
    size = choice.micro_batch_size
    return json.dumps([*sections, held_in_half(recipe), size], default=str, sort_keys=True)


def held_in_half(recipe: Recipe) -> bool:
    """Whether the dense model is in bf16: as the run holds it, where that trains an adapter."""
    return recipe.adapter is not None and recipe.training.precision == "bf16"


def _pass(
    recipe: Recipe,
    needs: Making,
    dense: Any,
    choice: Choice,
    predicted: Callable[[Recipe, Any, Choice], Prediction],
) -> Ledger:
    """Of a pass over the dense model that notes what layers are given.

    Where no adapter goes with the model, that of its training, which keeps no less.
    """
    plain = recipe.changed(
        **dict.fromkeys(_NEITHER),
        optimizer={"method": "adamw"},
        training__recompute="none",
        adapter=None,
    )
    if not held_in_half(recipe):
        plain = plain.changed(training__precision="fp32")
    targets = {"targets": list(needs.layers)} if needs.layers else {}
    try:
        return predicted(plain.changed(adapter=_WATCH | targets), dense, choice).ledger
    except InputError:
        return predicted(plain, dense, choice).ledger
