"""What all optimizers of matrices have from their base, shown by GaLore."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.core.errors import InputError
from modicum.optim import SOAP, AuON, GaLore, Muon, NAdamW, step_in_backward
from modicum.proofs.contracts.optim.subjects import numbers


def test_embeddings_and_thin_layers_are_no_matrices() -> None:
    layers = {"embed": nn.Embedding(9, 8), "wide": nn.Linear(8, 8), "thin": nn.Linear(8, 3)}
    model = nn.ModuleDict(layers)
    for given, fields, expected in (
        (model.parameters(), {}, {(8, 8), (9, 8)}),
        (model.named_parameters(), {}, {(8, 8)}),
        (model.named_parameters(), {"exclude": ("wide.weight",)}, {(9, 8)}),
    ):
        groups = GaLore(given, rank=4, **fields).param_groups
        assert {tuple(p.shape) for g in groups if g["matrix"] for p in g["params"]} == expected


def after_twelve(bits: int, dtype: torch.dtype, reload_at: int) -> tuple[Tensor, dict[str, Tensor]]:
    """How far a matrix goes, and the state, which a new optimizer takes up on the way."""
    weight = nn.Parameter(numbers(130, 70).to(dtype))
    start = weight.detach().clone()
    saved: dict[str, Any] = {}
    for first, last in ((0, reload_at), (reload_at, 12)):
        optimizer = GaLore([weight], lr=0.1, rank=40, update_gap=5, state_bits=bits)
        if saved:
            optimizer.load_state_dict(saved)
        for step in range(first, last):
            weight.grad = numbers(130, 70, name=f"{step}", dtype=dtype)
            optimizer.step()
        saved = optimizer.state_dict()
    return weight.detach() - start, optimizer.state[weight]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "kept"), [(16, torch.bfloat16), (8, torch.uint8)])
def test_moments_in_few_bits_stay_near_and_survive_a_state_dictionary(
    bits: int, kept: torch.dtype, dtype: torch.dtype
) -> None:
    (exact, _), (near, _) = (after_twelve(each, dtype, reload_at=0) for each in (32, bits))
    again, state = after_twelve(bits, dtype, reload_at=7)
    assert torch.equal(near, again)
    assert [state[name].dtype for name in ("exp_avg", "exp_avg_sq")] == [kept] * 2
    assert 0 < (exact - near).float().norm() / exact.float().norm() < 0.05


def test_small_updates_of_bf16_weights_are_made_in_fp32() -> None:
    # Computed in bf16, alpha times the direction would be rounded before it is subtracted.
    half = nn.Parameter(numbers(9, 6).bfloat16())
    full = nn.Parameter(half.detach().float())
    for weight in (half, full):
        weight.grad = numbers(9, 6, name="gradient").bfloat16().to(weight.dtype)
        GaLore([weight], lr=0.05, rank=2).step()
    assert torch.equal(half.detach(), full.detach().bfloat16())


def test_in_the_backward_pass_one_gradient_is_counted() -> None:
    shapes = (
        TrainedParameter("weight", (16, 16), "matrix"),
        TrainedParameter("bias", (16,), "vector"),
    )
    ledger = GaLore.value(rank=4, in_backward=True).ledger(OptimizerQuery(shapes))
    assert ledger.bytes("gradient") == 4 * 16 * 16


def test_stepping_in_the_backward_pass_can_be_ended() -> None:
    layer = nn.Linear(16, 16)
    stop = step_in_backward(GaLore(layer.parameters(), rank=4))
    stop()
    layer(numbers(3, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def replaced(optimizer: torch.optim.Optimizer) -> dict[Tensor, nn.Parameter]:
    """Put copies in the groups, as accelerate puts sharded parameters; each by what it is of."""
    of = {
        old: nn.Parameter(old.detach().clone())
        for group in optimizer.param_groups
        for old in group["params"]
    }
    for group in optimizer.param_groups:
        group["params"] = [of[old] for old in group["params"]]
    return of


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(GaLore, {"rank": 4}), (Muon, {}), (SOAP, {}), (AuON, {}), (NAdamW, {})],
)
def test_parameters_that_replace_others_before_the_first_step_are_trained(
    kind: Any, fields: dict[str, Any]
) -> None:
    layer = nn.Linear(8, 6)
    expected = kind(layer.named_parameters(), lr=0.1, **fields)
    optimizer = kind(layer.named_parameters(), lr=0.1, **fields)
    of = replaced(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does
    for step in range(3):
        for old, new in of.items():
            new.grad = numbers(*new.shape, name=f"{step}")
            old.grad = new.grad.clone()
        optimizer.step()
        expected.step()
    for old, new in of.items():
        assert torch.equal(old, new)
    for new in replaced(optimizer).values():
        new.grad = torch.ones_like(new)
    with pytest.raises(InputError, match="replaced by others after a step"):
        optimizer.step()


def test_parameters_that_replace_others_are_trained_in_the_backward_pass() -> None:
    layer, other = nn.Linear(8, 6), nn.Linear(8, 6)
    other.load_state_dict(layer.state_dict())
    optimizer = GaLore(layer.parameters(), rank=4)
    of = {layer.weight: other.weight, layer.bias: other.bias}
    for group in optimizer.param_groups:
        group["params"] = [of[old] for old in group["params"]]
    expected = GaLore(layer.parameters(), rank=4)
    stop = step_in_backward(optimizer)
    for step in range(2):
        inputs = numbers(3, 8, name=f"{step}")
        other(inputs).square().sum().backward()
        layer(inputs).square().sum().backward()
        expected.step()
        expected.zero_grad()
    stop()
    assert torch.equal(other.weight, layer.weight)
    assert torch.equal(other.bias, layer.bias)
