"""Hydra's own promises: its branches, its merge with three biases, what it is a case of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import Hydra, LoRA
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.errors import InputError
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import llama, numbers, stir, tokens

FULL = {"rank": 3, "sequential_rank": 2, "scale": 1.7, "biases": True}


def model(*, bias: bool = True, inputs: int = 12, outputs: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(inputs, outputs, bias=bias), nn.Tanh(), nn.Linear(outputs, 4))
    return made.double()


def expected(net: nn.Module, layer: Any, x: Tensor, scale: float) -> Tensor:
    """The layer's output by its definition."""
    y0 = x @ net.weight.T + (0 if net.bias is None else net.bias)
    p = (x @ layer.A_p.T + layer.c_p) @ layer.B_p.T + layer.d_p
    s = (y0 @ layer.A_s.T + layer.c_s) @ layer.B_s.T + layer.d_s
    return y0 + scale * (p + s)


@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_output_and_merge_with_base_and_branch_biases(bias: bool, learn_scale: bool) -> None:
    net, plain = model(bias=bias), model(bias=bias)
    adapter = stir(Hydra(**FULL, learn_scale=learn_scale).attach(net))
    inputs = numbers(7, 12, dtype=torch.float64)
    [(_, layer), _] = adapter.layers()
    scale = layer.s.item() if learn_scale else 1.7
    assert scale == pytest.approx(1.7, abs=1.0)
    found, adapted = net[0](inputs), net(inputs)
    torch.testing.assert_close(found, expected(plain[0], layer, inputs, scale))
    adapter.merge()
    torch.testing.assert_close(net(inputs), adapted)
    weight = net[0].weight - plain[0].weight
    assert torch.linalg.matrix_rank(weight, atol=1e-9) == 5
    original = plain[0].weight
    folded = scale * (layer.B_p @ layer.A_p + layer.B_s @ layer.A_s @ original)
    torch.testing.assert_close(weight, folded)
    adapter.unmerge()
    torch.testing.assert_close(net(inputs), adapted)
    adapter.detach()
    assert torch.equal(net(inputs), plain(inputs))
    assert (net[0].bias is None) == (not bias)


def test_without_a_sequential_branch_it_is_lora() -> None:
    ids, first = tokens(), llama()
    reference = LoRA(rank=3, alpha=5.1).attach(first)
    second = llama()
    other = Hydra(rank=3, sequential_rank=0, scale=1.7).attach(second)
    for (_, one), (_, two) in zip(
        reference.named_parameters(), other.named_parameters(), strict=True
    ):
        moved = numbers(*one.shape, name=f"{tuple(one.shape)}")
        one.data.copy_(moved)
        two.data.copy_(moved)
    assert torch.equal(first(ids), second(ids))
    assert type(next(iter(other.layers()))[1].as_lora()) is tuple


def test_without_a_parallel_branch_on_the_identity_it_is_a_linear_bottleneck() -> None:
    net = nn.Sequential(nn.Linear(6, 6, bias=False))
    nn.init.eye_(net[0].weight)
    adapter = stir(Hydra(rank=0, sequential_rank=2, biases=True).attach(net))
    [(_, layer)] = adapter.layers()
    inputs = numbers(5, 6)
    bottleneck = inputs + (inputs @ layer.A_s.T + layer.c_s) @ layer.B_s.T + layer.d_s
    torch.testing.assert_close(net(inputs), bottleneck)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_plain_lora_that_it_is_computes_the_same(rank: int) -> None:
    net, ids = llama(), tokens()
    adapter = stir(Hydra(rank=rank, sequential_rank=2, learn_scale=True).attach(net))
    merged = copy.deepcopy(llama())
    with torch.no_grad():
        for name, layer in adapter.layers():
            a, b, scale = layer.as_lora()
            assert a.shape[0] == rank + 2
            merged.get_submodule(name).weight += scale * b @ a
    torch.testing.assert_close(merged(ids), net(ids), rtol=0, atol=1e-5)


def test_biases_are_no_plain_lora() -> None:
    for net, value in ((model(bias=True), Hydra()), (model(bias=False), Hydra(biases=True))):
        [(_, layer), _] = value.attach(net.float()).layers()
        assert layer.as_lora() is None
        assert layer.peft_bias() is not None


def test_with_another_on_the_layer_it_reads_what_that_makes_of_it() -> None:
    net, inputs = model(), numbers(3, 12, dtype=torch.float64)
    adapter = stir(Hydra(**FULL).attach(net))
    alone = net(inputs)
    second = stir(LoRA(rank=2).attach(net, name="second"))
    adapter.activate(alone=False)
    both = net(inputs)
    assert not torch.allclose(both, alone)
    with pytest.raises(InputError, match="second is applied before it"):
        adapter.merge()
    second.merge()
    torch.testing.assert_close(net(inputs), both)
    adapter.merge()
    torch.testing.assert_close(net(inputs), both)


def test_on_a_quantized_base_it_reads_what_the_layer_gives() -> None:
    held = NF4Linear.from_dense(torch.randn(64, 64) / 8, torch.randn(64))
    net, inputs = nn.Sequential(held).eval(), numbers(5, 64)
    y0 = net(inputs)
    adapter = stir(Hydra(rank=2, sequential_rank=2).attach(net))
    [(_, layer)] = adapter.layers()
    more = inputs @ layer.A_p.T @ layer.B_p.T + y0 @ layer.A_s.T @ layer.B_s.T
    torch.testing.assert_close(net(inputs), y0 + more, rtol=0, atol=1e-4)
    adapted = net(inputs)
    adapter.merge(dense=torch.float32)
    torch.testing.assert_close(net(inputs), adapted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"biases": True}, {"learn_scale": True}])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 12), (12, 48)])
def test_parameters_by_formula(fields: dict[str, Any], inputs: int, outputs: int) -> None:
    net = nn.Sequential(nn.Linear(inputs, outputs))
    adapter = Hydra(rank=3, sequential_rank=2, **fields).attach(net)
    count = 3 * (inputs + outputs) + 2 * outputs * 2
    count += (3 + 2 + 2 * outputs) * fields.get("biases", False) + fields.get("learn_scale", False)
    assert sum(parameter.numel() for parameter in adapter.parameters()) == count


def test_a_learned_scale_is_trained_without_decay() -> None:
    net = model().float()
    adapter = Hydra(scale=0.5, learn_scale=True).attach(net)
    named = dict(adapter.named_parameters())
    assert named["0.s"].shape == (1,)
    assert named["0.s"].item() == 0.5
    groups = optimizer_groups(net, learning_rate=1e-2, weight_decay=0.1)
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert decays["0.layers_by_adapter.default.s"] == 0.0
    assert decays["0.layers_by_adapter.default.A_p"] == 0.1
    optimizer = torch.optim.AdamW(groups)
    for _ in range(3):
        net(torch.ones(2, 12)).square().sum().backward()
        optimizer.step()
    assert named["0.s"].item() != 0.5


def test_dropout_is_between_the_factors() -> None:
    net = nn.Sequential(nn.Linear(6, 6, bias=False))
    adapter = stir(Hydra(rank=1, sequential_rank=0, dropout=0.5).attach(net))
    [(_, layer)] = adapter.layers()
    inputs = numbers(200, 6)
    with torch.no_grad():
        net.train()
        update = net(inputs) - inputs @ net[0].weight.T
        kept = 2 * inputs @ layer.A_p.T @ layer.B_p.T
    zero = update.abs().sum(1) < 1e-5
    assert 60 < int(zero.sum()) < 140
    torch.testing.assert_close(update[~zero], kept[~zero], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank": 0, "sequential_rank": 0}, "must be above 0"),
        ({"rank": 6}, "rank: above 5, the smaller width of the layer 0"),
        ({"rank": 1, "sequential_rank": 6}, "sequential_rank: above 5"),
    ],
)
def test_ranks_that_a_layer_does_not_have_are_refused(fields: dict[str, int], said: str) -> None:
    net = model()
    with pytest.raises(InputError, match=said):
        Hydra(**fields).attach(net)
    assert all(parameter.requires_grad for parameter in net.parameters())
    with pytest.raises(InputError, match="an embedding"):
        Hydra(targets=("0",)).attach(nn.Sequential(nn.Embedding(4, 4)))
