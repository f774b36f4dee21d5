"""The section of a recipe that says how trained weights are written."""

from __future__ import annotations

from typing import Literal

from modicum.recipe.sections import Auto, Section


class ExportSection(Section):
    """How the trained weights are written; nothing of it changes what is computed.

    A run that resumes may have other values here.
    """

    dtype: Literal["float32", "bfloat16", "float16"] | Auto = "auto"
    """Of a training of all weights, what the exported ones are rounded to; what is trained is fp32.
    auto: what the files of `model.path` hold, where that is one dtype, else float32. An adapter is
    written in fp32 in any case."""
