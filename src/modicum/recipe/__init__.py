"""All settings of a run; see `modicum.recipe.recipe`."""

from __future__ import annotations

from modicum.recipe.nested import assign, differences
from modicum.recipe.outputs import ExportSection, TrackingSection
from modicum.recipe.recipe import Recipe
from modicum.recipe.searched import recipe_path
from modicum.recipe.sections import (
    BudgetSection,
    CheckpointSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    ParallelSection,
    SamplesSection,
    Section,
    SourceSection,
)
from modicum.recipe.slots import SLOTS, methods_for
from modicum.recipe.training import TrainingSection

__all__ = [
    "SLOTS",
    "BudgetSection",
    "CheckpointSection",
    "DataSection",
    "EvaluationSection",
    "ExportSection",
    "ModelSection",
    "ParallelSection",
    "Recipe",
    "SamplesSection",
    "Section",
    "SourceSection",
    "TrackingSection",
    "TrainingSection",
    "assign",
    "differences",
    "methods_for",
    "recipe_path",
]
