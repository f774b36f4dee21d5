"""The section of a recipe that says what its machines cost."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from modicum.core.contracts.method import PositiveFloat
from modicum.recipe.sections import Section


class CostSection(Section):
    """What the machines of a run cost; plan, run and report say money and energy where it is given.

    Nothing of it changes what is computed, and a run that resumes may have other values.
    """

    price_per_hour: PositiveFloat | None = None
    """Of all machines of the run together, while it runs. null: no money is shown."""
    currency: Annotated[str, Field(min_length=1, max_length=12)] = "USD"
    """What the price is in, as it is shown."""
    watts: PositiveFloat | Literal["measured"] | None = None
    """The power that all machines of the run draw together. measured: what the processor's (RAPL)
    and the accelerator's (NVML, by pynvml) own counters say, of a run of one rank. null: no energy
    is shown."""
