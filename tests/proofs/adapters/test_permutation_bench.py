from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modicum.adapters import LoRA
from modicum.core.contracts.catalog import find
from modicum.proofs.adapters import permutation_bench
from modicum.proofs.adapters.permutation_bench import FULL, QUICK, FullTuning, PermutationBench
from modicum.proofs.base import ProofRun

TINY = replace(
    QUICK, symbols=8, tokens=8, blocks=1, width=16, mlp_width=32, pretraining_steps=40, steps=20
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> PermutationBench:
    monkeypatch.setattr(permutation_bench, "QUICK", TINY)
    return PermutationBench(ProofRun(find("lora"), null=False, full=False))


def test_the_floor_is_the_entropy_of_the_source() -> None:
    assert pytest.approx(0.7295, abs=1e-4) == FULL.floor
    assert FULL.model.parameter_count() == 456_288


def test_two_modes_of_four_change(tiny: PermutationBench) -> None:
    table = tiny.new(seed=0)
    assert torch.equal(table[2:], tiny.old[2:])
    assert not torch.equal(table[:2], tiny.old[:2])


def test_tuning_counts_what_it_trains_and_keeps(tiny: PermutationBench) -> None:
    full, lora = tiny.tune(FullTuning(), 3e-3), tiny.tune(LoRA(rank=2), 3e-2)
    parameters = TINY.model.parameter_count()
    tensors = len(list(tiny.base.parameters()))
    assert full.trained == parameters
    # A gradient, two moments and, a tensor, a counter of steps.
    assert full.state_bytes == 12 * parameters + 4 * tensors
    expected = 2 * (4 * (16 + 16) + 2 * (16 + 32) + (32 + 16))
    assert lora.trained == expected
    assert lora.state_bytes == 12 * expected + 4 * 14
    assert lora.peak_bytes < full.peak_bytes
    table = tiny.new(seed=0)
    assert full.excess < tiny.source.excess(tiny.base, table)
    assert tiny.tune(LoRA(rank=2), 3e-2) == lora


def test_the_best_rate_is_chosen_by_the_first_seed(tiny: PermutationBench) -> None:
    best = tiny.best(LoRA(rank=1), rates=(1e-6, 3e-2, 10.0))
    assert best.learning_rate == 3e-2
    assert list(best.outcomes) == [tiny.tune(LoRA(rank=1), 3e-2, seed) for seed in (0, 1)]
