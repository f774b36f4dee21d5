"""Every compressor of the catalog against every check of the room: a new method needs no test."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from modicum.compress import FWSVD, Calibration
from modicum.compress.layers import Layer
from modicum.core.catalog import Record, catalog
from modicum.core.ledger import Entry, Ledger, Work
from modicum.proofs import run_battery
from modicum.proofs.contracts.base import Check, NotApplicable, checks

COMPRESSORS = [record for record in catalog().values() if record.room == "compress"]
CASES = [
    pytest.param(
        record,
        entry,
        id=f"{record.name}-{entry.name}",
        marks=[pytest.mark.dear] if entry.dear else [],
    )
    for record in COMPRESSORS
    for entry in checks("compress")
]


@pytest.mark.parametrize(("record", "entry"), CASES)
def test_compressor(record: Record, entry: Check) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entry.run(record.load())
        except NotApplicable as reason:
            pytest.skip(str(reason))


def test_the_catalog_has_compressors_and_every_check_says_what_it_promises() -> None:
    assert "fwsvd" in {record.name for record in COMPRESSORS}
    battery = checks("compress")
    assert len(battery) == len({entry.name for entry in battery}) >= 15
    assert all(entry.sentence.endswith((".", ":")) for entry in battery)
    assert 0 < len(checks("compress", cheap_only=True)) < len(battery)


class Careless(FWSVD):
    """A compressor with what the battery must notice."""

    def metric(self, layer: Layer, calibration: Calibration) -> Tensor:
        noise = torch.rand(layer.in_features)  # another one at each fit
        return super().metric(layer, calibration) * noise

    def ledger(self, at: object) -> Ledger:
        return Ledger.of(Entry("weight", 1), Work(1))


def test_a_careless_compressor_is_found_wanting_and_told_why() -> None:
    results = {result.name: result for result in run_battery(Careless, cheap_only=True)}
    wanting = {name for name, result in results.items() if not result.passed}
    assert wanting >= {
        "the_report_tells_the_error",
        "fitting_twice_gives_the_same_bits",
        "parameters_and_bytes",
        "work",
    }
    assert "PyTorch counts" in results["work"].message
    assert results["targets"].passed


def test_a_value_can_be_checked_too() -> None:
    assert all(result.passed for result in run_battery(FWSVD(rank=3, damping=0.0), cheap_only=True))
