"""FlyLoRA: its projection, which ranks are chosen, exact gradients, the bias, sums of adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import FlyLoRA, LoRAFA
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.flylora import FlyLoRALayer
from modicum.core.errors import InputError
from modicum.core.random import normal_
from modicum.proofs.bench.meters import saved_bytes


def layer_of(adapter: AttachedAdapter) -> FlyLoRALayer:
    [(_, layer)] = adapter.layers()
    assert isinstance(layer, FlyLoRALayer)
    return layer


def on_one(
    dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any
) -> tuple[nn.Sequential, FlyLoRALayer]:
    """A model of one layer, 24 to 11, with an adapter of rank 8 that does something."""
    model = nn.Sequential(nn.Linear(24, 11, dtype=dtype))
    adapter = FlyLoRA(**{"rank": 8, "active": 3, **fields}).attach(model, seed=seed)
    layer = layer_of(adapter)
    with torch.no_grad():
        normal_(layer.B, seed=seed, name="B")
    return model, layer


def inputs(rows: int = 17, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal_(torch.empty(rows, 24, dtype=dtype), seed=0, name="inputs")


def dense(layer: FlyLoRALayer, x: Tensor) -> Tensor:
    """s B (mask A x), of ordinary operations."""
    u = x @ layer.A.T
    wanted = u + layer.d if layer.method.choice == "signed" else (u + layer.d).abs()
    kth = wanted.topk(layer.method.active, dim=1).values[:, -1:]
    return layer.method.scale * (u * (wanted >= kth)) @ layer.B.T


@pytest.mark.parametrize(("rank", "active", "entries"), [(8, 3, 9), (32, 8, 6), (32, 1, 1)])
def test_every_row_of_a_has_as_many_entries(rank: int, active: int, entries: int) -> None:
    model = nn.Sequential(nn.Linear(24, 5))
    layer = layer_of(FlyLoRA(rank=rank, active=active).attach(model))
    assert set((layer.A != 0).sum(1).tolist()) == {entries}


def test_entries_of_a_have_variance_one_over_r_squared() -> None:
    layer = layer_of(FlyLoRA(rank=16, active=4).attach(nn.Sequential(nn.Linear(4096, 2))))
    drawn = layer.A[layer.A != 0]
    assert drawn.numel() == 16 * 1024
    assert float(drawn.std()) == pytest.approx(1 / 16, rel=0.02)
    columns = (layer.A != 0).sum(0)
    assert 2 < float(columns.float().mean()) < 6


@pytest.mark.parametrize("choice", ["signed", "absolute"])
def test_outputs_and_gradients_are_those_of_the_dense_masked_form(choice: str) -> None:
    model, layer = on_one(torch.float64, choice=choice)
    layer.d += torch.linspace(-0.2, 0.2, 8, dtype=torch.float64)
    mine, other = (inputs(dtype=torch.float64).requires_grad_() for _ in range(2))
    weight = normal_(torch.empty(11, dtype=torch.float64), seed=0, name="of the loss")
    found = model(mine)
    expected = other @ model[0].weight.T + model[0].bias + dense(layer, other)
    assert torch.allclose(found, expected)
    (found.square() @ weight).sum().backward()
    assert layer.B.grad is not None
    by_layer, layer.B.grad = layer.B.grad, None
    (expected.square() @ weight).sum().backward()
    assert torch.allclose(by_layer, layer.B.grad)
    assert mine.grad is not None
    assert other.grad is not None
    assert torch.allclose(mine.grad, other.grad)


def test_a_token_uses_k_ranks_and_the_bias_enters_the_choice_alone() -> None:
    model, layer = on_one()
    before = model(inputs())
    layer.d[2] = 100.0
    chosen = layer.chosen(layer.projected(inputs()))
    assert chosen.shape == (17, 3)
    assert bool((chosen == 2).any(1).all())
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    assert torch.allclose(model(inputs()) - model[0].plain(inputs()), dense(layer, inputs()))
    assert not torch.equal(model(inputs()), before)


def test_with_all_ranks_active_it_is_lora_fa_with_the_same_a() -> None:
    model, layer = on_one(active=8)
    twin = nn.Sequential(nn.Linear(24, 11))
    twin.load_state_dict({n: t for n, t in model.state_dict().items() if "layers_by" not in n})
    other = LoRAFA(rank=8, alpha=16.0, correct=False).attach(twin)
    [(_, its)] = other.layers()
    with torch.no_grad():
        its.get_buffer("A").copy_(layer.A)
        its.get_parameter("B").copy_(layer.B)
    outputs = [each(inputs()) for each in (model, twin)]
    assert torch.allclose(*outputs, atol=1e-6)
    for each in outputs:
        each.square().sum().backward()
    assert layer.B.grad is not None
    assert torch.allclose(layer.B.grad, its.get_parameter("B").grad, rtol=1e-5, atol=1e-4)


def test_the_bias_moves_towards_even_loads_once_an_update() -> None:
    model = nn.Sequential(nn.Linear(24, 11))
    adapter = FlyLoRA(rank=8, active=3, bias_rate=0.125).attach(model)
    following, own = adapter.steps(), layer_of(adapter)
    for part in inputs().split(5):
        model(part).sum().backward()
    load = torch.bincount(own.chosen(own.projected(inputs())).flatten(), minlength=8).double()
    assert torch.equal(own.entered()[:-1].double(), load)
    assert not bool(own.d.any())
    following.update()
    assert torch.equal(own.d.double(), 0.125 * (load.mean() - load).sign())
    moved = own.d.clone()
    model.eval()(inputs())
    following.update()
    assert torch.equal(own.d, moved), "an evaluation moves it"


def test_the_sum_of_two_is_the_sum_of_their_outputs() -> None:
    model, inputs_ = nn.Sequential(nn.Linear(24, 11)), inputs()
    base = model(inputs_)
    first, second = (
        FlyLoRA(rank=8, active=3).attach(model, name=name, seed=seed)
        for seed, name in enumerate(("first", "second"))
    )
    changes = []
    for adapter in (first, second):
        with torch.no_grad():
            normal_(layer_of(adapter).B, seed=3, name=adapter.name)
        adapter.activate()
        changes.append(model(inputs_) - base)
    first.activate(alone=False)
    assert torch.allclose(model(inputs_), base + changes[0] + changes[1], atol=1e-5)
    assert not torch.equal(layer_of(first).A, layer_of(second).A)


def test_without_their_gradient_inputs_have_the_base_s_alone() -> None:
    model, layer = on_one(input_gradient=False)
    x = inputs().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, model[0].weight.sum(0).expand_as(x))
    assert layer.B.grad is not None
    assert bool(layer.B.grad.any())


def test_of_a_token_k_numbers_and_places_are_kept_and_no_input() -> None:
    model, _ = on_one()
    x = inputs(64).requires_grad_()
    with saved_bytes((*model.parameters(), *model.buffers())) as kept:
        model(x).sum()
    assert kept.total == 64 * 3 * (4 + 1)


def test_it_chooses_in_fp32_whatever_the_model_is_in() -> None:
    model, layer = on_one()
    model.bfloat16()
    assert (layer.A.dtype, layer.d.dtype, layer.B.dtype) == (
        torch.float32,
        torch.float32,
        torch.bfloat16,
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.projected(inputs().bfloat16()).dtype == torch.float32


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    model = nn.Sequential(nn.Linear(24, 11))
    with pytest.raises(InputError, match="above the rank 4"):
        FlyLoRA(rank=4, active=5).attach(model)
    assert type(model[0]) is nn.Linear
    adapter = FlyLoRA(rank=4, active=2).attach(model)
    with pytest.raises(InputError, match="cannot be merged; keep it on the model"):
        adapter.merge()
    state = FlyLoRA(rank=4, active=2, choice="absolute").attach(nn.Sequential(nn.Linear(24, 11)))
    with pytest.raises(InputError, match="attach one with it"):
        model.load_state_dict(state.model.state_dict())
