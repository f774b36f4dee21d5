"""Orders of units: the model computes the same, and the way back gives its weights to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.map import ModelMap, Permutation, UnitOrder, in_front, map_of
from modicum.core.random import normal_
from modicum.models import create
from modicum.models.config import ModelConfig

TOKENS = torch.tensor([[1, 5, 2, 7, 3], [4, 4, 0, 9, 10]])
KINDS = [
    {"heads": 4},
    {"heads": 4, "attention_bias": True, "mlp_bias": True},
    {"heads": 6, "kv_heads": 3, "head_width": 4, "tied_embeddings": True},
    {"heads": 4, "kv_heads": 2, "attention_bias": True, "mlp_bias": True},
]


def decoder(dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    """A decoder with weights, norms and biases that are neither zero nor one."""
    width = 24 if sizes["heads"] == 6 else 16
    config = ModelConfig(vocabulary_size=11, width=width, layers=2, mlp_width=22, **sizes)
    model = create(config, seed=0, dtype=dtype)
    for name, parameter in model.named_parameters():
        normal_(parameter.data, seed=0, name=name, std=0.3)
    return model.eval()


def moves(found: ModelMap) -> Permutation:
    """Of each block some groups, heads within their groups, and neurons, brought to the front."""
    orders = []
    for attention, mlp in zip(found.all_attentions(), found.all_mlps(), strict=True):
        groups, heads, neurons = attention.groups, attention.heads, mlp.neurons
        orders.append(UnitOrder(groups, tuple(in_front(groups.count, [groups.count - 1]))))
        runs = range(0, heads.count, heads.within)
        turned = [start + place for start in runs for place in reversed(range(heads.within))]
        orders.append(UnitOrder(heads, tuple(turned)))
        chosen = in_front(neurons.count, [20, 3, 7], [3, 11])
        orders.append(UnitOrder(neurons, tuple(chosen)))
    return Permutation(tuple(orders))


@pytest.mark.parametrize("sizes", KINDS)
def test_a_permuted_model_computes_the_same_and_comes_back_to_the_bit(sizes: Any) -> None:
    model = decoder(**sizes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outputs = model(TOKENS)
    moved = moves(map_of(model))
    moved.apply(model)
    scale = outputs.abs().max().item()
    torch.testing.assert_close(model(TOKENS), outputs, rtol=0, atol=1e-6 * scale)
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    expected = {n for n in before if "_proj." in n and n.split(".")[-2:] not in STILL}
    assert changed == expected
    for name, tensor in model.state_dict().items():
        assert torch.equal(moved.permuted(name, before[name]), tensor), name
        assert torch.equal(moved.inverse().permuted(name, tensor), before[name]), name
    moved.inverse().apply(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# What adds to the stream is in the stream's order, which stays.
STILL = [["o_proj", "bias"], ["down_proj", "bias"]]


def test_gradients_of_what_was_moved_are_those_that_were_there_moved() -> None:
    model, other = decoder(heads=4, kv_heads=2), decoder(heads=4, kv_heads=2)
    moved = moves(map_of(model))
    moved.apply(other)
    for each in (model, other):
        each(TOKENS).square().sum().backward()
    for (name, one), (_, two) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert one.grad is not None
        expected = moved.permuted(name, one.grad)
        scale = expected.abs().max().item()
        torch.testing.assert_close(two.grad, expected, rtol=0, atol=1e-5 * scale, msg=name)


def test_low_precision_comes_back_to_the_bit_too() -> None:
    model = decoder(torch.bfloat16, heads=4, kv_heads=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moved = moves(map_of(model))
    moved.apply(model)
    moved.inverse().apply(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_is_in_front_is_a_slice() -> None:
    model = decoder(heads=4)
    up, down = [4, 9, 1], [9, 2]
    mlp = map_of(model).blocks[0].mlps[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Permutation((UnitOrder(mlp.neurons, tuple(in_front(22, up, down))),)).apply(model)
    rows = model.get_parameter(mlp.up[0].tensor)[:3]
    assert torch.equal(rows, before[mlp.up[0].tensor][[1, 4, 9]])
    columns = model.get_parameter(mlp.down.tensor)[:, 2:4]
    assert torch.equal(columns, before[mlp.down.tensor][:, [9, 2]])


def test_a_wrong_order_leaves_the_model_untouched() -> None:
    model = decoder(heads=4, kv_heads=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = map_of(model)
    neurons, heads = found.all_mlps()[0].neurons, found.all_attentions()[0].heads
    fine = UnitOrder(neurons, tuple(reversed(range(22))))
    for wrong in (UnitOrder(neurons, (0, 1)), UnitOrder(heads, (2, 1, 0, 3))):
        with pytest.raises(InputError):
            Permutation((fine, wrong)).apply(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for chosen in ([3, 3], [22], [-1]):
        with pytest.raises(InputError, match="different units"):
            in_front(22, chosen)
        with pytest.raises(InputError, match="different units"):
            in_front(22, [], chosen)


def test_a_fused_layer_is_moved_as_its_slices_lie() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=29, n_embd=16, n_layer=1, n_head=4, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for name, parameter in model.named_parameters():
        normal_(parameter.data, seed=0, name=name, std=0.3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found, ids = map_of(model), torch.arange(8)[None]
    outputs: Tensor = model(ids).logits
    orders = [UnitOrder(found.all_attentions()[0].groups, (2, 0, 3, 1))]
    orders += [UnitOrder(found.all_mlps()[0].neurons, tuple(in_front(64, [60, 5], [5])))]
    moved = Permutation(tuple(orders))
    moved.apply(model)
    scale = outputs.abs().max().item()
    torch.testing.assert_close(model(ids).logits, outputs, rtol=0, atol=1e-6 * scale)
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(model.get_parameter(name), before[name])
    assert torch.equal(moved.permuted(name, before[name]), model.get_parameter(name))
    moved.inverse().apply(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_places_are_on_the_device_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(heads=4)
    moved, devices = moves(map_of(model)), list[str]()

    def noted(tensor: Tensor, dim: int, places: Tensor) -> Tensor:
        devices.append(places.device.type)
        return tensor

    monkeypatch.setattr(Tensor, "index_select", noted)
    name = next(name for name, _ in model.named_parameters() if name.endswith("down_proj.weight"))
    moved.permuted(name, torch.empty(model.get_parameter(name).shape, device="meta"))
    assert devices == ["meta", "meta"]
