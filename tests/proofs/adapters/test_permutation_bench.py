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


def test_sequences_follow_the_permutation_of_their_mode(tiny: PermutationBench) -> None:
    table = tiny.new(seed=0)
    assert all(sorted(row) == list(range(8)) for row in table.tolist())
    assert torch.equal(table[2:], tiny.old[2:])
    assert not torch.equal(table[:2], tiny.old[:2])
    tokens = tiny._batch(table, torch.Generator().manual_seed(0), 2000)
    mode, symbols = tokens[:, 0] - 8, tokens[:, 1:]
    assert set(mode.tolist()) == {0, 1, 2, 3}
    follows = table[mode[:, None], symbols[:, :-1]] == symbols[:, 1:]
    assert follows.float().mean().item() == pytest.approx(0.9 + 0.1 / 8, abs=0.01)


def test_a_model_that_knows_the_source_has_no_excess(tiny: PermutationBench) -> None:
    table = tiny.new(seed=0)
    one_hot = torch.nn.functional.one_hot(table, 12).float()
    right, any_symbol = 0.9 * one_hot, (0.1 / 8) * (torch.arange(12) < 8).float()
    log_source = (right + any_symbol + 1e-30).log()

    class Oracle(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(*tokens.shape, 12)
            logits[:, 1:] = log_source[tokens[:, :1] - 8, tokens[:, 1:]]
            return logits

    assert tiny._excess(Oracle(), table) == pytest.approx(0.0, abs=1e-6)

    class Uniform(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 12)

    expected = torch.log(torch.tensor(12.0)).item() - TINY.floor
    assert tiny._excess(Uniform(), table) == pytest.approx(expected, abs=1e-6)


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
    assert full.excess < tiny._excess(tiny.base, table)
    assert tiny.tune(LoRA(rank=2), 3e-2) == lora


def test_the_best_rate_is_chosen_by_the_first_seed_and_found_once(tiny: PermutationBench) -> None:
    best = tiny.best(LoRA(rank=1), rates=(1e-6, 3e-2))
    assert best.learning_rate == 3e-2
    assert [run.learning_rate for run in best.runs] == [3e-2, 3e-2]
    assert best.excess == pytest.approx(sum(run.excess for run in best.runs) / 2)
    assert tiny.best(LoRA(rank=1), rates=(1e-6, 3e-2)) is best
    assert best.trained == best.runs[0].trained
