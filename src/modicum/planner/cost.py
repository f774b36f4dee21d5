"""What a run costs in money and energy, by prices and power that its recipe states."""

from __future__ import annotations

from typing import Any

from modicum.recipe.cost import CostSection

_HOUR, _KILO = 3600.0, 1000.0
JOULES_PER_KWH = _HOUR * _KILO


def cost_of(asked: CostSection, seconds: float) -> dict[str, Any]:
    """Money and energy (kWh) of a run of so many seconds; only what is known by the recipe.

    >>> cost_of(CostSection(price_per_hour=2.5, currency="EUR", watts=400), 7200)
    {'money': 5.0, 'currency': 'EUR', 'kwh': 0.8}
    """
    hours = seconds / _HOUR
    found: dict[str, Any] = {}
    if asked.price_per_hour is not None:
        found |= {"money": asked.price_per_hour * hours, "currency": asked.currency}
    if isinstance(asked.watts, float | int):
        found["kwh"] = asked.watts / _KILO * hours
    return found
