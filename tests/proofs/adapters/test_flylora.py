"""The proof's arm of ranks that are drawn: as many a token, and any."""

from __future__ import annotations

import torch
from torch import nn

from modicum.adapters.flylora import FlyLoRALayer
from modicum.proofs.adapters.flylora import DrawnRanks


def test_ranks_are_drawn_anew_from_the_seed() -> None:
    value, found = DrawnRanks(rank=16, active=4), []
    for seed in (0, 0, 1):
        [(_, layer)] = value.attach(nn.Sequential(nn.Linear(24, 11)), seed=seed).layers()
        assert isinstance(layer, FlyLoRALayer)
        u = torch.ones(500, 1) * torch.arange(16.0)
        found.append([layer.chosen(u) for _ in range(2)])
    (first, second), same, (other, _) = found
    assert torch.equal(first, same[0])
    assert torch.equal(second, same[1])
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    assert (first.sort(1).values.diff(dim=1) > 0).all()
    loads = torch.bincount(first.flatten(), minlength=16) / len(first)
    assert loads.min() > 0.15
    assert loads.max() < 0.35
