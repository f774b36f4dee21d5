from __future__ import annotations

import pytest
import torch

from modicum.proofs.bench.permutations import PermutationSource

SOURCE = PermutationSource(8, 8)


def test_the_floor_is_the_entropy_of_the_source() -> None:
    assert PermutationSource(64, 40).floor == pytest.approx(0.7295, abs=1e-4)


def test_sequences_follow_the_permutation_of_their_mode() -> None:
    table = SOURCE.table(seed=0)
    assert all(sorted(row) == list(range(8)) for row in table.tolist())
    tokens = SOURCE.batch(table, torch.Generator().manual_seed(0), 2000)
    mode, symbols = tokens[:, 0] - 8, tokens[:, 1:]
    assert set(mode.tolist()) == {0, 1, 2, 3}
    follows = table[mode[:, None], symbols[:, :-1]] == symbols[:, 1:]
    assert follows.float().mean().item() == pytest.approx(0.9 + 0.1 / 8, abs=0.01)


def test_a_model_that_knows_the_source_has_no_excess() -> None:
    table = SOURCE.table(seed=0)
    one_hot = torch.nn.functional.one_hot(table, 12).float()
    right, any_symbol = 0.9 * one_hot, (0.1 / 8) * (torch.arange(12) < 8).float()
    log_source = (right + any_symbol + 1e-30).log()

    class Oracle(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(*tokens.shape, 12)
            logits[:, 1:] = log_source[tokens[:, :1] - 8, tokens[:, 1:]]
            return logits

    assert SOURCE.excess(Oracle(), table) == pytest.approx(0.0, abs=1e-6)
    tokens = SOURCE.batch(table, torch.Generator().manual_seed(1), 4000)
    assert SOURCE.loss(Oracle(), tokens).item() == pytest.approx(SOURCE.floor, rel=0.05)

    class Uniform(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 12)

    expected = torch.log(torch.tensor(12.0)).item() - SOURCE.floor
    assert SOURCE.excess(Uniform(), table) == pytest.approx(expected, abs=1e-6)
