"""Trion: Muon at full rank, the authors' loop, the rank of an update."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.optim import Muon, Trion
from modicum.optim.dct import dct_basis
from modicum.optim.orthogonal import NewtonSchulz
from modicum.proofs.contracts.optim.subjects import numbers

SHAPES = ((24, 16), (16, 24), (20, 20), (7, 40))
Factor = Literal["original", "match_rms_adamw"]


@pytest.mark.parametrize("factor", ["original", "match_rms_adamw"])
def test_at_full_rank_it_is_muon(factor: Factor) -> None:
    for shape in SHAPES:
        one, other = (nn.Parameter(numbers(*shape)) for _ in range(2))
        fields = {"lr": 0.02, "weight_decay": 0.1, "shape_factor": factor}
        ours = Trion([one], rank=min(shape), **fields)  # type: ignore[arg-type]
        theirs = Muon([other], nesterov=False, **fields)  # type: ignore[arg-type]
        for step in range(20):
            for weight, optimizer in ((one, ours), (other, theirs)):
                weight.grad = numbers(*shape, name=f"{step}")
                optimizer.step()
        assert (one - other).abs().max() < 1e-5, shape


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)], ids=str)
def test_twenty_steps_are_the_authors_loop(shape: tuple[int, int]) -> None:
    weight = nn.Parameter(numbers(*shape))
    optimizer = Trion([weight], lr=0.02, rank=5, momentum=0.9, weight_decay=0.1)
    tall = shape[0] >= shape[1]
    theirs = weight.detach().clone() if tall else weight.detach().T.clone()
    columns, moment = dct_basis(16, torch.device("cpu")).T, torch.zeros_like(theirs)
    factor = max(1.0, shape[0] / shape[1]) ** 0.5
    for step in range(20):
        full = numbers(*shape, name=f"{step}")
        weight.grad = full.clone()
        moment = moment + (full if tall else full.T)
        chosen = (moment @ columns).abs().sum(0).topk(5).indices.sort().values
        low = moment @ columns[:, chosen]
        moment = moment - (1 - 0.9) * low @ columns[:, chosen].T
        update = NewtonSchulz()(low) @ columns[:, chosen].T
        theirs = (1 - 0.02 * 0.1) * theirs - 0.02 * factor * update
        optimizer.step()
        found = weight.detach() if tall else weight.detach().T
        assert (found - theirs).abs().max() < 1e-5, step
    kept = optimizer.state[weight]["momentum_buffer"]
    torch.testing.assert_close(kept if tall else kept.T, moment, rtol=0, atol=1e-4)


def test_an_update_has_the_rank() -> None:
    weight = nn.Parameter(numbers(24, 16))
    optimizer = Trion([weight], rank=3)
    for step in range(3):
        before = weight.detach().clone()
        weight.grad = numbers(24, 16, name=f"{step}")
        optimizer.step()
        values = torch.linalg.svdvals(weight.detach() - before)
        assert int((values > 1e-4 * values[0]).sum()) == 3


def test_fields_out_of_bounds_are_refused() -> None:
    for fields in ({"rank": 0}, {"momentum": 1.0}, {"norm": 3}):
        with pytest.raises(InputError, match=next(iter(fields))):
            Trion.value(**fields)
