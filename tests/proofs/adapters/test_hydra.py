"""The proof's directed test: what fits (I + C) W, and with how many numbers."""

from __future__ import annotations

from modicum.adapters import Hydra, LoRA
from modicum.proofs.adapters import hydra
from modicum.proofs.adapters.hydra import FITTED, FITTING_STEPS, fitted


def test_a_sequential_branch_of_rank_two_fits_and_lora_of_rank_one_does_not(monkeypatch) -> None:
    error, steps, numbers = fitted(Hydra(rank=0, sequential_rank=2))
    assert error <= FITTED
    assert steps <= FITTING_STEPS
    assert numbers == 2 * 2 * 32
    monkeypatch.setattr(hydra, "FITTING_STEPS", 300)
    error, steps, numbers = fitted(LoRA(rank=1))
    assert error > 0.1
    assert steps == 301
    assert numbers == 128 + 32 > 2 * 2 * 32
