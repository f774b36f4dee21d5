"""Dropout whose mask is kept as bits: its values, its gradients, what is kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modicum.adapters import DoRA, Hydra
from modicum.adapters.dropping import dropped
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import numbers


@pytest.mark.parametrize("probability", [0.3, 1.0])
@pytest.mark.parametrize("shape", [(2, 5, 7), (0, 4), (64,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchs_with_a_bit_a_number(
    probability: float, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = numbers(*shape, dtype=dtype).requires_grad_()
    torch.manual_seed(5)
    expected = F.dropout(x, probability)
    (of_x,) = torch.autograd.grad(expected.square().sum(), x)
    torch.manual_seed(5)
    with saved_bytes([x]) as saved:
        found = dropped(x, probability)
    assert torch.equal(found, expected)
    assert saved.total == -(-x.numel() // 8)
    (own,) = torch.autograd.grad(found.square().sum(), x)
    torch.testing.assert_close(own, of_x)


def test_it_can_be_differentiated_twice() -> None:
    x = numbers(3, 5, dtype=torch.float64).requires_grad_()

    def run(given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(2)
        return dropped(given, 0.4)

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


@pytest.mark.parametrize("half", [False, True])
def test_dora_keeps_the_input_once_outputs_thin_values_and_bits(half: bool) -> None:
    rows, rank, (ins, outs) = 64, 4, (48, 40)
    dtype = torch.bfloat16 if half else torch.float32
    model = nn.Sequential(nn.Linear(ins, outs, dtype=dtype))
    adapter = DoRA(rank=rank, dropout=0.25).attach(model)
    apart = [*model.parameters(), *model.buffers()]
    inputs = numbers(rows, ins, dtype=dtype).requires_grad_()
    model.train()
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=half),
        saved_bytes([*apart, inputs]) as saved,
    ):
        model(inputs)
    rows_kept = rows * (outs + rank) * dtype.itemsize + rows * ins // 8
    of_the_layer = 4 * 4 * outs  # the norms, what they grow by, and the like: once, not a position
    assert rows_kept <= saved.total <= rows_kept + of_the_layer
    assert next(adapter.layers())[1].training


def test_hydra_keeps_bits_of_what_is_between_its_factors() -> None:
    rows, model = 64, nn.Sequential(nn.Linear(48, 40))
    Hydra(rank=3, sequential_rank=2, dropout=0.25).attach(model)
    apart = [*model.parameters(), *model.buffers()]
    inputs = numbers(rows, 48).requires_grad_()
    model.train()
    with saved_bytes([*apart, inputs]) as saved:
        model(inputs)
    assert saved.total == rows * (40 + 3 + 2) * 4 + rows * (3 + 2) // 8
