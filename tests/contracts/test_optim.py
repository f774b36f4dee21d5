"""Values of optimizers that the battery's own choice leaves out."""

from __future__ import annotations

import pytest

from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.optim import GaLore
from modicum.proofs import run_battery

# What the values of the battery's own choice leave out.
VALUES = [
    GaLore.value(rank=3, update_gap=2, side="full", svd="randomized", on_refresh="rotate"),
    GaLore.value(rank=18, update_gap=3, side="reverse_std", projector_bits=16, stagger=True),
    GaLore.value(rank=2, update_gap=2, on_refresh="reset", side="left"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.side}-{value.on_refresh}")
def test_values_of_galore(value: OptimizerMethod) -> None:
    results = run_battery(value, cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []
