"""LoRA-SB begins with full tuning's first step, and its steps are projected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from modicum import adapters
from modicum.adapters import LoRASB
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.lora_sb import LoRASBLayer
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import full_weight, linear_form
from modicum.proofs.contracts.adapters.subjects import numbers, stir

BATCHES = [numbers(6, 9, name="one"), numbers(4, 9, name="two")]
TARGETS = numbers(9, 7, name="targets")


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch @ TARGETS.to(batch)).square().sum()


def linear(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(9, 7, dtype=dtype))
    for name, parameter in model.named_parameters():
        parameter.data = numbers(*parameter.shape, name=name).to(dtype)
    return model


def attached(
    model: nn.Module, batches: Any = None, **fields: Any
) -> tuple[AttachedAdapter, LoRASBLayer]:
    value = LoRASB(**({"rank": 3, "first_step": 0.1} | fields))
    dtype = next(model.parameters()).dtype
    batches = BATCHES if batches is None else batches
    adapter = value.attach(model, batches=[b.to(dtype) for b in batches], loss=square)
    [(_, layer)] = adapter.layers()
    assert isinstance(layer, LoRASBLayer)
    return adapter, layer


def gradient(model: nn.Module, batches: Any = None) -> Tensor:
    """That of the weight itself, by autograd."""
    weight = model[0].weight.detach().requires_grad_()
    total = torch.zeros((), dtype=weight.dtype)
    for batch in BATCHES if batches is None else batches:
        given = {"0.weight": weight}
        outputs = torch.func.functional_call(model, given, (batch.to(weight.dtype),))
        total = total + (outputs - batch.to(weight.dtype) @ TARGETS.to(weight)).square().sum()
    return torch.autograd.grad(total, weight)[0]


@given(rank=st.integers(1, 5), alpha=st.one_of(st.none(), st.floats(0.5, 20)))
def test_it_begins_with_the_best_part_of_the_first_step(rank: int, alpha: float | None) -> None:
    step = -0.1 * gradient(linear()).sign()
    left, singular, right = torch.linalg.svd(step, full_matrices=False)
    model, base = linear(), linear()
    _, layer = attached(model, rank=rank, alpha=alpha)
    one = torch.eye(rank)
    torch.testing.assert_close(layer.B.T @ layer.B, one, rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.A @ layer.A.T, one, rtol=0, atol=1e-5)
    best = (left[:, :rank] * singular[:rank]) @ right[:rank]
    change = layer.delta().detach()
    torch.testing.assert_close(change, best, rtol=0, atol=1e-5)
    lost, tail = (change - step).square().sum(), singular[rank:].square().sum()
    torch.testing.assert_close(lost, tail, rtol=1e-4, atol=1e-6)
    x = BATCHES[0]
    expected = base(x) + x @ best.T
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("alpha", [None, 12.0])
def test_its_gradient_and_a_step_of_sgd_are_the_projected_ones(alpha: float | None) -> None:
    model = linear(torch.float64)
    adapter, layer = attached(model, alpha=alpha)
    stir(adapter)
    scale = layer.method.scale
    merged = linear(torch.float64)
    merged[0].weight.data += layer.delta().detach()
    full = gradient(merged)
    loss = sum((square(model, b.double()) for b in BATCHES), torch.zeros(()))
    loss.backward()
    b, a = layer.B, layer.A
    assert layer.R.grad is not None
    torch.testing.assert_close(layer.R.grad, scale * b.T @ full @ a.T, rtol=0, atol=1e-10)
    # Of all updates s B X A of a layer, the one that is nearest to G has this X.
    nearest = torch.linalg.pinv(scale * b) @ full @ torch.linalg.pinv(a)
    torch.testing.assert_close(layer.R.grad / scale**2, nearest, rtol=0, atol=1e-10)
    before = layer.delta().detach().clone()
    torch.optim.SGD(adapter.parameters(), lr=0.01).step()
    moved = layer.delta().detach() - before
    projected = -0.01 * b @ (b.T @ full @ a.T) @ a
    torch.testing.assert_close(moved, scale**2 * projected, rtol=0, atol=1e-12)


def test_what_is_trained_is_small_and_what_is_kept_is_not(tmp_path: Path) -> None:
    adapter, _ = attached(linear())
    assert sum(parameter.numel() for parameter in adapter.parameters()) == 3 * 3
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    square(adapter.model, BATCHES[0]).backward()
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if t.ndim]
    assert sum(tensor.numel() for tensor in state) == 2 * 3 * 3
    adapter.save(tmp_path / "own", form="modicum")
    with safe_open(tmp_path / "own" / "adapter.safetensors", "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    assert shapes == {"0.A": [3, 9], "0.B": [7, 3], "0.R": [3, 3]}


def test_a_peft_file_is_the_equal_lora(tmp_path: Path) -> None:
    adapter, layer = attached(linear(), alpha=6.0)
    stir(adapter)
    adapter.save(tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6.0)
    again = adapters.load(linear(), tmp_path / "peft")
    [(_, lora)] = again.layers()
    torch.testing.assert_close(lora.delta(), layer.delta(), rtol=0, atol=1e-6)


def test_the_same_data_give_the_same_bits_whatever_the_order_of_layers() -> None:
    states = [attached(linear())[0].state_dict() for _ in range(2)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    _, other = attached(linear(), list(reversed(BATCHES)))
    _, first = attached(linear())
    torch.testing.assert_close(other.B @ other.B.T, first.B @ first.B.T, rtol=0, atol=1e-4)


def test_averaging_r_of_clients_averages_their_models() -> None:
    start, _ = attached(linear())
    clients = []
    for number in range(4):
        adapter, layer = attached(linear())
        adapter.load_state_dict(start.state_dict())
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.1)
        for _ in range(3):
            square(adapter.model, numbers(5, 9, name=f"client {number}")).backward()
            optimizer.step()
            optimizer.zero_grad()
        clients.append((adapter.state_dict(), layer.delta().detach().clone()))
    assert not torch.allclose(clients[0][1], clients[1][1], atol=1e-2)
    mean = start.state_dict()
    mean["0.R"] = torch.stack([state["0.R"] for state, _ in clients]).mean(0)
    server, layer = attached(linear())
    server.load_state_dict(mean)
    expected = torch.stack([change for _, change in clients]).mean(0)
    torch.testing.assert_close(layer.delta().detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_on_a_quantized_base_nobody_need_read_the_full_weight(form: str) -> None:
    weight, batch = numbers(64, 64, name="W"), numbers(32, 64, name="x")

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch.roll(1, 1)).square().sum()

    model = nn.Sequential(linear_form(form).from_dense(weight, None))
    dense = nn.Sequential(nn.Linear(64, 64, bias=False))
    dense[0].weight.data = full_weight(model[0]).detach().clone()
    found = []
    for each in (model, dense):
        adapter = LoRASB(rank=4).attach(each, batches=[batch], loss=loss)
        found.append(next(adapter.layers())[1].delta().detach())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


def unreached(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum() * 0


@pytest.mark.parametrize(
    ("fields", "given", "problem"),
    [
        ({"rank": 8}, {}, "above 7, the smaller width of the layer 0"),
        ({"rank": 2}, {"batches": [BATCHES[0][:1]]}, "above 1, the directions"),
        ({}, {"batches": []}, "no example to look at"),
        ({}, {"batches": None}, "give `batches` and `loss`"),
        ({}, {"loss": unreached}, "no gradient at this layer"),
        ({}, {"loss": lambda model, batch: batch.sum()}, "the loss has no gradient"),
        ({}, {"batches": [BATCHES[0] * float("nan")]}, "not finite"),
        ({"targets": ["table"]}, {}, "kind embedding"),
    ],
)
def test_what_cannot_be_leaves_the_model_as_it_was(
    fields: dict[str, Any], given: dict[str, Any], problem: str
) -> None:
    model = linear().train()
    model.table = nn.Embedding(5, 3)
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=problem):
        LoRASB(**({"rank": 3, "targets": ["0"]} | fields)).attach(
            model, **({"batches": BATCHES, "loss": square} | given)
        )
    assert [type(module) for module in model] == [nn.Linear, nn.Embedding]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_it_looks_at_as_many_examples_as_it_says() -> None:
    _, few = attached(linear(), examples=6)
    _, same = attached(linear(), BATCHES[:1], examples=600)
    assert torch.equal(few.B, same.B)
    _, all_of_them = attached(linear(), examples=7)
    assert not torch.allclose(all_of_them.delta(), few.delta())


def test_a_randomized_svd_finds_nearly_the_same() -> None:
    _, exact = attached(linear())
    _, drawn = attached(linear(), niter=8)
    torch.testing.assert_close(drawn.delta(), exact.delta(), rtol=0, atol=1e-3)
