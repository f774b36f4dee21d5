"""What a run has cost so far, by what its recipe states and what the machine's counters say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modicum.core.errors import InputError
from modicum.core.machine.energy import EnergyCounters
from modicum.planner import Plan
from modicum.planner.cost import JOULES_PER_KWH, cost_of


class CostMeter:
    """Money and energy of a run over all its processes.

    Args:
        before: what `run.json` says of the processes before this one.
    """

    def __init__(self, plan: Plan, before: Mapping[str, Any] | None) -> None:
        self._asked = plan.recipe.cost
        self._before = float((before or {}).get("kwh") or 0.0)
        self._device, self._ranks = plan.device, plan.ranks
        self._counters: EnergyCounters | None = None

    def begin(self) -> None:
        """Count from now on, where the recipe asks for measured power.

        Raises:
            InputError: this machine says none, or there are several ranks.
        """
        if self._asked.watts != "measured":
            return
        self._counters = EnergyCounters(0 if self._device == "cuda" else None)
        wanted = "nvml" if self._device == "cuda" else "rapl"
        problem = None
        if self._ranks > 1:
            problem = "the energy of several ranks is not measured"
        elif wanted not in self._counters.sources:
            problem = f"no counter of energy can be read here ({wanted})"
        if problem is not None:
            raise InputError(
                f"{problem}; say what the machines draw, in watts, or leave it out",
                field="cost.watts",
                value="measured",
            )

    def row(self, seconds: float) -> dict[str, Any] | None:
        """What `run.json` says after so many seconds; None where nothing is known."""
        found = cost_of(self._asked, seconds)
        if self._counters is not None:
            found["kwh"] = self._before + self._counters.joules() / JOULES_PER_KWH
        if "kwh" in found:
            measured = self._counters is not None and " + ".join(self._counters.sources)
            found["kwh_by"] = measured or "stated"
        return found or None
