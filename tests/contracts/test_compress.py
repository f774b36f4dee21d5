"""The battery of compressors finds the mistakes that compressors are made with."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.compress import FWSVD, Calibration
from modicum.core.contracts.ledger import Entry, Ledger, Work
from modicum.core.layers.layer_sites import Site
from modicum.proofs import run_battery


class Careless(FWSVD):
    """A compressor with what the battery must notice."""

    def metric(self, layer: Site, calibration: Calibration) -> Tensor:
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
