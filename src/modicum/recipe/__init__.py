"""All settings of a run; see `modicum.recipe.recipe`."""

from __future__ import annotations

from modicum.recipe.recipe import Recipe, assign, differences
from modicum.recipe.sections import (
    BudgetSection,
    CheckpointSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    ParallelSection,
    SamplesSection,
    Section,
    TrainingSection,
)
from modicum.recipe.slots import SLOTS, methods_for

__all__ = [
    "SLOTS",
    "BudgetSection",
    "CheckpointSection",
    "DataSection",
    "EvaluationSection",
    "ModelSection",
    "ParallelSection",
    "Recipe",
    "SamplesSection",
    "Section",
    "TrainingSection",
    "assign",
    "differences",
    "methods_for",
]
