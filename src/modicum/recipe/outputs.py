"""The sections of a recipe about what a run gives to others: its weights, and its curves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from modicum.recipe.sections import Auto, Section


class ExportSection(Section):
    """How the trained weights are written; nothing of it changes what is computed.

    A run that resumes may have other values here.
    """

    dtype: Literal["float32", "bfloat16", "float16"] | Auto = "auto"
    """Of a training of all weights, what the exported ones are rounded to; what is trained is fp32.
    auto: what the files of `model.path` hold, where that is one dtype, else float32. An adapter is
    written in fp32 in any case."""


class TrackingSection(Section):
    """Where a run can be followed next to its own files; nothing of it changes what is computed.

    `metrics.jsonl` and `evaluations.jsonl` are written in any case.
    """

    to: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Field(strict=False)] = ()
    """Trackers: tensorboard (files in the run folder), wandb, mlflow. Each needs the extra of its
    name."""
    project: str = "modicum"
    """The project of W&B, or experiment of MLflow, that runs are filed under."""
    name: str | None = None
    """The run's name there; null means that of the run folder."""
