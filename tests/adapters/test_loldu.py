"""What LoLDU promises exactly: its factorization, its starts, its steps and its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoLDU, load
from modicum.adapters.loldu import LoLDULayer
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import numbers, odd_model, stir

STARTS = ("lu", "uniform", "normal", "constant", "ones", "zeros")


def layer_of(weight: Tensor, value: LoLDU) -> tuple[nn.Module, LoLDULayer]:
    model = nn.Sequential(nn.Linear(*reversed(weight.shape), dtype=weight.dtype))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    [(_, layer)] = value.attach(model).layers()
    assert isinstance(layer, LoLDULayer)
    return model, layer


@pytest.mark.parametrize("shape", [(40, 40), (40, 25), (25, 40)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_the_factors_and_pivots_are_the_weight(
    shape: tuple[int, int], dtype: torch.dtype, most: float
) -> None:
    weight = numbers(*shape, dtype=dtype)
    _, layer = layer_of(weight, LoLDU())
    lower = layer.up / layer.step
    product = lower * layer.pivots() @ layer.down
    assert ((product - weight).norm() / weight.norm()).item() < most
    assert lower.abs().max().item() <= 1 + 1e-6
    assert (lower.abs() > 1 - 1e-6).any(0).all()  # each column has its one
    assert layer.step.item() == pytest.approx(layer.z_0.abs().median().item())


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("rank", [None, 3])
def test_every_start_leaves_the_output(start: str, rank: int | None) -> None:
    model, inputs = odd_model(), numbers(4, 7)
    before = model(inputs)
    adapter = LoLDU(rank=rank, start=start).attach(model)
    assert torch.equal(model(inputs), before)
    for _, layer in adapter.layers():
        assert isinstance(layer, LoLDULayer)
        assert torch.equal(layer.pivots(), layer.z_0)
        step = layer.z_0.abs().median().item()
        assert layer.step.item() == (pytest.approx(step) if step else 1.0)
    stir(adapter)
    assert not torch.equal(model(inputs), before)
    for name, layer in adapter.layers():
        # What is residual and what z is of come to the same.
        weight = model.get_submodule(name).weight
        lower = layer.up / layer.step
        residual = weight - lower * layer.z_0 @ layer.down
        torch.testing.assert_close(
            residual + lower * layer.pivots() @ layer.down, weight + layer.delta()
        )


def test_starts_are_those_of_the_paper() -> None:
    weight = numbers(30, 30)
    pivots = layer_of(weight, LoLDU())[1].z_0
    mean, std = pivots.mean().item(), pivots.std(correction=0).item()
    found = {start: layer_of(weight, LoLDU(start=start))[1].z_0 for start in STARTS}
    assert torch.equal(found["zeros"], torch.zeros(30))
    assert torch.equal(found["ones"], torch.ones(30))
    torch.testing.assert_close(found["constant"], torch.full((30,), mean))
    assert found["uniform"].abs().max().item() <= abs(mean) / 2
    assert found["uniform"].unique().numel() == 30
    assert abs(found["normal"].mean().item() - mean) < std
    assert 0.5 * std < found["normal"].std().item() < 2 * std
    again = layer_of(weight, LoLDU(start="normal"))[1].z_0
    assert torch.equal(again, found["normal"])


@pytest.mark.parametrize("rank", [None, 4])
def test_its_gradient_is_that_of_the_dense_weight(rank: int | None) -> None:
    weight = numbers(9, 6, dtype=torch.float64)
    model, layer = layer_of(weight, LoLDU(rank=rank))
    inputs = numbers(20, 6, dtype=torch.float64)
    model(inputs).square().sum().backward()
    z = layer.pivots().requires_grad_()
    lower = layer.up / layer.step
    dense = weight + lower * (z - layer.z_0) @ layer.down
    (inputs @ dense.T + model[0].bias.detach()).square().sum().backward()
    torch.testing.assert_close(layer.shift.grad, z.grad * layer.step, rtol=1e-9, atol=1e-9)


def test_the_change_has_at_most_as_many_directions_as_pivots_are_trained() -> None:
    _, layer = layer_of(numbers(20, 15), LoLDU(rank=4))
    with torch.no_grad():
        layer.shift.normal_()
    assert int(torch.linalg.matrix_rank(layer.delta(), rtol=1e-5)) == 4


def test_tiny_pivots_stay_in_the_residual() -> None:
    weight = numbers(12, 3) @ numbers(3, 10, name="right")  # of rank 3
    model, layer = layer_of(weight, LoLDU())
    assert layer.shift.shape == (10,)
    assert (layer.z_0 != 0).sum().item() == 3
    assert torch.equal(layer.step, layer.z_0[layer.z_0 != 0].abs().median()[None])
    assert layer.down.isfinite().all()
    assert layer.down.abs().max().item() < 1e3
    lower = layer.up / layer.step
    torch.testing.assert_close(lower * layer.z_0 @ layer.down, weight, rtol=1e-4, atol=1e-4)
    model(numbers(5, 10)).square().sum().backward()
    assert torch.equal(layer.shift.grad != 0, layer.z_0 != 0)


def test_the_largest_pivots_can_be_chosen() -> None:
    weight = numbers(30, 30)
    every = layer_of(weight, LoLDU())[1].z_0
    first, largest = (
        layer_of(weight, LoLDU(rank=6, choose=choose))[1].z_0 for choose in ("first", "largest")
    )
    assert torch.equal(first, every[:6])
    assert torch.equal(largest, every[every.abs().argsort(descending=True, stable=True)[:6]])


def test_one_rate_serves_weights_of_all_sizes_and_decay_draws_to_the_start() -> None:
    weight, inputs = numbers(8, 8, dtype=torch.float64), numbers(16, 8, dtype=torch.float64)
    changes = []
    for size in (1.0, 100.0):
        model, layer = layer_of(size * weight, LoLDU())
        optimizer = torch.optim.AdamW([layer.shift], lr=0.1, eps=1e-30, weight_decay=0.0)
        model(inputs).square().sum().backward()
        optimizer.step()
        changes.append(layer.delta() / size)
    torch.testing.assert_close(changes[0], changes[1])
    [group] = optimizer_groups(model, learning_rate=0.1, weight_decay=0.5)
    optimizer = torch.optim.AdamW([group])
    before = (layer.pivots() - layer.z_0).clone()
    layer.shift.grad = torch.zeros_like(layer.shift)
    optimizer.state.clear()
    optimizer.step()
    torch.testing.assert_close(layer.pivots() - layer.z_0, before * (1 - 0.1 * 0.5))


def test_a_file_has_one_number_a_pivot_and_gives_the_weight_to_the_bit(tmp_path: Path) -> None:
    model = odd_model()
    adapter = stir(LoLDU().attach(model))
    adapter.save(tmp_path, form="modicum")
    other = odd_model()
    again = load(other, tmp_path)
    named = dict(again.named_parameters())
    assert {name: value.shape for name, value in named.items()} == {
        "wide.shift": (7,),
        "narrow.shift": (5,),
    }
    adapter.merge()
    again.merge()
    for name, value in model.state_dict().items():
        if name.endswith("weight"):
            assert torch.equal(other.state_dict()[name], value), name


def test_a_rank_above_a_layers_width_is_refused() -> None:
    model = odd_model()
    with pytest.raises(InputError, match="above 5, the smaller width of the layer narrow"):
        LoLDU(rank=6).attach(model)
    assert type(model.get_submodule("wide")) is nn.Linear
