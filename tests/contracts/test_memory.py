"""The battery of policies on activations finds the mistakes that policies are made with."""

from __future__ import annotations

import pytest
from torch import Tensor

from modicum.core.codecs.dual_quantization import DualQuantization
from modicum.core.codecs.error_bounded import CompressedTensor
from modicum.memory import COMET
from modicum.proofs import run_battery


def test_values_pass_too_also_when_bounds_change_soon() -> None:
    results = run_battery(COMET(warmup=2, every=2), cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []


class Coarse(COMET):
    """Begins with a bound of half of the largest element."""

    def first_bound(self, largest: float) -> float:
        return largest / 2


def wanting(value: COMET) -> set[str]:
    results = run_battery(value, cheap_only=True)
    return {result.name for result in results if not result.passed}


def test_what_is_too_coarse_is_found_wanting() -> None:
    assert wanting(Coarse()) == {"weight_gradients_are_near"}


def test_masks_from_values_are_found_wanting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small elements are zeros then, and a ReLU's gradient stops where it should not."""

    def nonzero(self: DualQuantization, record: CompressedTensor) -> Tensor:
        values = self.decompress(record)
        return values > 0.1 * values.max()

    monkeypatch.setattr(DualQuantization, "nonzero", nonzero)
    assert "errors_stay_in_their_layer" in wanting(COMET())


def test_storages_that_a_relu_keeps_are_found_wanting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modicum.core.layers.saved_tensors._RELUS", set())
    assert wanting(COMET()) >= {"storages_are_let_go", "bytes_are_fewer_and_given_back"}
