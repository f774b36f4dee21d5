"""What recipes to start from have in common, whatever is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modicum.core.errors import DoesNotFit
from modicum.planner.plan import Plan
from modicum.planner.planning import plan
from modicum.planner.starting import rules
from modicum.planner.starting.draft import Draft, OpenQuestion
from modicum.planner.starting.recipe_text import model_words
from modicum.recipe import Recipe
from modicum.recipe.training import WARMUPS
from modicum.tasks import Inputs


@dataclass(frozen=True)
class Start:
    """A recipe to start from, and what it was made of.

    Attributes:
        draft: its settings, each with the reason, and the questions that came up.
        model, data: what was found, as plain values.
        plan: of the recipe; None where it does not fit.
        refused: why it does not fit, with what would make it fit.
    """

    draft: Draft
    recipe: Recipe
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    plan: Plan | None
    refused: DoesNotFit | None


def set_budget(draft: Draft, memory: str | None) -> None:
    """Set the memory that a run may take, or ask for it."""
    why = "bytes on the accelerator, or of the process on a CPU"
    if memory is not None:
        draft.set("budget.memory", memory, why)
        return
    text = "How much memory may it take, as in 8GB?"
    draft.question(
        OpenQuestion("budget.memory", text, None), f"all that is free now; else {why}, as in 8GB"
    )


def model_facts(draft: Draft, inputs: Inputs, dtype: str | None) -> dict[str, Any]:
    """What was found of a model, as plain values; what it is goes next to its path."""
    config, parameters = inputs.config, inputs.config.parameter_count()
    if inputs.model_folder is None:
        return {"path": None, "parameters": parameters}
    path = draft.settings["model.path"].value
    found = {
        "path": path, "folder": str(inputs.model_folder), "parameters": parameters,
        "dtype": dtype, "context": config.context, "weights": inputs.weights,
    }  # fmt: skip
    draft.set("model.path", path, model_words(found).removeprefix(f"{path}, "))
    return found


def set_pace(draft: Draft, updates: int, warmup: tuple[int, str]) -> None:
    """Set how the learning rate begins, and how often a run is evaluated."""
    if not draft.asked.keys() & {f"training.{name}" for name in WARMUPS[1:]}:
        draft.set("training.warmup_steps", *warmup)
    data = draft.recipe().data
    if data.validation_fraction or data.validation_path is not None:
        draft.set("evaluation.every", *rules.evaluate_every(updates))


def planned(draft: Draft) -> tuple[Plan | None, DoesNotFit | None]:
    """The plan of the recipe, or why there is none; sets how often the run is saved."""
    made, refused = None, None
    try:
        made = plan(draft.recipe())
    except DoesNotFit as error:
        refused = error
    every = rules.checkpoint_every(None if made is None else made.seconds)
    draft.set("checkpoint.every", *every)
    return made, refused
