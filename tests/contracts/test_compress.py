"""The battery of compressors finds the mistakes that compressors are made with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.compress import FWSVD, Calibration, StructuredPruning
from modicum.core.contracts.ledger import Entry, Ledger, Work
from modicum.core.layers.layer_sites import Site
from modicum.core.layers.map_parts import Units
from modicum.proofs import run_battery


class Careless(FWSVD):
    """A compressor with what the battery must notice."""

    def metric(self, layer: Site, calibration: Calibration) -> Tensor:
        noise = torch.rand(layer.in_features)  # another one at each fit
        return super().metric(layer, calibration) * noise

    def ledger(self, at: object) -> Ledger:
        return Ledger.of(Entry("weight", 1), Work(1))


@pytest.mark.expensive
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


class CarelessPruner(StructuredPruning):
    """A pruner with what the battery must notice."""

    def worth(self, model: nn.Module, units: Units, calibration: Calibration, seed: int) -> Tensor:
        return torch.rand(units.count)  # another one at each fit

    def ledger(self, at: object) -> Ledger:
        return Ledger.of(Entry("weight", 1), Work(1))


def test_a_careless_pruner_is_found_wanting() -> None:
    results = {result.name: result for result in run_battery(CarelessPruner, cheap_only=True)}
    wanting = {name for name, result in results.items() if not result.passed}
    assert wanting >= {
        "fitting_twice_gives_the_same_bits",
        "calibrations_travel",
        "more_is_removed_at_a_larger_share",
        "parameters_and_bytes",
        "work",
        "activations",
    }
    assert results["kept_units_are_as_they_were"].passed


def test_a_pruner_that_looks_at_no_data_passes_too() -> None:
    value = StructuredPruning(score="magnitude", neurons=0.4, groups=0.5)
    assert all(result.passed for result in run_battery(value, cheap_only=True))
