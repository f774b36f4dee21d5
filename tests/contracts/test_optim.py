"""Every optimizer of the catalog against every check of the room: a new one needs no new test."""

from __future__ import annotations

import warnings

import pytest

from modicum.core.catalog import Record, catalog
from modicum.core.optimizers import OptimizerMethod
from modicum.optim import GaLore
from modicum.proofs import run_battery
from modicum.proofs.contracts.base import Check, NotApplicable, checks

OPTIM = [record for record in catalog().values() if record.room == "optim"]
CASES = [
    pytest.param(
        record,
        entry,
        id=f"{record.name}-{entry.name}",
        marks=[pytest.mark.dear] if entry.dear else [],
    )
    for record in OPTIM
    for entry in checks("optim", slot=record.info.slot)
]
# What the values of the battery's own choice leave out.
VALUES = [
    GaLore.value(rank=3, update_gap=2, side="full", svd="randomized", on_refresh="rotate"),
    GaLore.value(rank=18, update_gap=3, side="reverse_std", projector_bits=16, stagger=True),
    GaLore.value(rank=2, update_gap=2, on_refresh="reset", side="left"),
]


@pytest.mark.parametrize(("record", "entry"), CASES)
def test_method(record: Record, entry: Check) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entry.run(record.load())
        except NotApplicable as reason:
            pytest.skip(str(reason))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.side}-{value.on_refresh}")
def test_values_of_galore(value: OptimizerMethod) -> None:
    results = run_battery(value, cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []


def test_the_catalog_has_optimizers_and_every_check_says_what_it_promises() -> None:
    assert {"adamw", "galore", "sgd"} <= {record.name for record in OPTIM}
    battery = checks("optim", slot="optimizer")
    assert len(battery) == len({entry.name for entry in battery}) >= 15
    assert all(entry.sentence.endswith(".") for entry in battery)
    assert 0 < len(checks("optim", slot="optimizer", cheap_only=True)) < len(battery)
