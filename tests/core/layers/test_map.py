"""The map of the decoder, the classifier and small hand-made models; exchanging and removing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoRA
from modicum.core.errors import InputError
from modicum.core.layers import map as layer_map
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.map import find_map, map_of, permute, remove, silence
from modicum.core.random import normal_
from modicum.models import convnet, llama
from modicum.models.config import ModelConfig
from modicum.models.convnet import ConvNetConfig


def filled(model: nn.Module) -> nn.Module:
    """The model in float64, with weights that are neither zero nor one."""
    for name, parameter in model.double().named_parameters():
        normal_(parameter.data, seed=0, name=name, std=0.3)
    return model.eval()


def numbers(*shape: int) -> Tensor:
    return normal_(torch.empty(shape, dtype=torch.float64), seed=1, name="x", std=1.0)


def decoder(**sizes: Any) -> llama.Llama:
    config = ModelConfig(vocabulary_size=11, width=16, layers=2, mlp_width=24, **sizes)
    model = llama.create(config, seed=0)
    filled(model)
    return model


TOKENS = torch.tensor([[1, 5, 2, 7]])


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 4, "kv_heads": 2},
        {"heads": 2, "tied_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {"heads": 4, "kv_heads": 1},
    ],
)
def test_what_the_decoder_says_of_itself_is_found_and_holds(sizes: dict[str, Any]) -> None:
    model = decoder(**sizes)
    found = find_map(model)
    assert found == map_of(model)
    assert found.unknown == {}
    assert bool(found.ties) is False  # one tensor, not two names of one
    before = model(TOKENS)
    for attention in found.all_attentions():
        heads = attention.heads
        order = [u + (1 if u % 2 == 0 else -1) for u in range(heads.count)]
        permute(model, heads, order)
        permute(model, attention.groups, range(attention.kv_heads)[::-1])
    for mlp in found.all_mlps():
        permute(model, mlp.neurons, range(mlp.neurons.count)[::-1])
    assert found.stream is not None
    permute(model, found.stream, range(found.width)[::-1])
    torch.testing.assert_close(model(TOKENS), before, rtol=0, atol=1e-6)


def test_removed_heads_and_neurons_of_the_decoder_are_as_if_zero() -> None:
    model = decoder(heads=4, kv_heads=2)
    zeroed = copy.deepcopy(model)
    for block in map_of(model).blocks:
        for units in (block.attentions[0].heads, block.mlps[0].neurons):
            silence(zeroed, units, [0, units.count - 1])
            remove(model, units, [0, units.count - 1])
    torch.testing.assert_close(model(TOKENS), zeroed(TOKENS), rtol=0, atol=1e-6)
    attention, mlp = model.get_submodule("model.layers.0.self_attn"), model.model.layers[0].mlp
    assert (attention.heads, attention.kv_heads) == (2, 2)
    assert (mlp.up_proj.out_features, mlp.down_proj.in_features) == (22, 22)
    # What is left has a map again, found anew: one head in each group.
    assert [a.heads.count for a in find_map(model).all_attentions()] == [2, 2]


def test_layers_in_another_form_are_named_and_left_alone() -> None:
    forms = FormPlan().with_default("nf4")
    quantized = llama.create(
        ModelConfig(vocabulary_size=11, width=16, layers=1, heads=2, forms=forms), seed=0
    )
    unknown = map_of(quantized).unknown
    assert unknown["model.layers.0.self_attn.q_proj"] == "its weight is held as nf4"
    adapted = decoder(heads=2)
    LoRA(rank=2, targets=("q_proj",)).attach(adapted)
    found = map_of(adapted)
    assert not found.all_attentions()
    assert "come of sum" in found.unknown["model.layers.0.self_attn"]
    assert len(found.all_mlps()) == 2


def test_a_model_without_memory_has_the_same_map() -> None:
    model = decoder(heads=4, kv_heads=2)
    assert find_map(copy.deepcopy(model).to("meta")) == find_map(model)


@pytest.mark.parametrize("norm", ["none", "group"])
def test_what_the_classifier_says_of_itself_is_found_and_holds(norm: Any) -> None:
    model = convnet.create(ConvNetConfig(widths=(8, 8, 16), size=8, norm=norm), seed=0)
    filled(model)
    found = find_map(model)
    assert found == map_of(model)
    assert [units.count for units in found.channels] == ([8, 8, 16] if norm == "none" else [4] * 3)
    images = numbers(2, 3, 8, 8)
    before = model(images)
    for units in found.channels:
        permute(model, units, range(units.count)[::-1])
    torch.testing.assert_close(model(images), before, rtol=0, atol=1e-6)
    zeroed = copy.deepcopy(model)
    for units in found.channels:
        silence(zeroed, units, [1, 2])
        remove(model, units, [1, 2])
    torch.testing.assert_close(model(images), zeroed(images), rtol=0, atol=1e-6)
    assert (zeroed(images) - before).abs().max() > 1e-3


class Flattened(nn.Module):
    """A linear layer that reads every place of every channel, after a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.head = nn.Linear(6 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, 2, 4, 4] to [B, 3]."""
        x = self.norm(self.first(x)).relu()
        return self.head((x + self.second(x)).flatten(1))


def test_depthwise_convolutions_and_flattened_channels_move_too() -> None:
    model = filled(Flattened())
    images = numbers(2, 2, 4, 4)
    found = find_map(model, images[:1])
    (units,) = found.channels
    assert [piece.shape for piece in units.readers] == [(6, 16)]
    assert found.norms[0].writer == "first.weight"
    before = model(images)
    permute(model, units, [3, 1, 5, 0, 2, 4])
    torch.testing.assert_close(model(images), before, rtol=0, atol=1e-6)
    zeroed = copy.deepcopy(model)
    silence(zeroed, units, [0, 4])
    remove(model, units, [0, 4])
    torch.testing.assert_close(model(images), zeroed(images), rtol=0, atol=1e-6)


class Early(nn.Module):
    """A block that also reads what the first block's norm gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        """Map [..., 4] to the same shape."""
        return x + self.down(self.up(early + self.norm(x)).relu())


class Reaching(nn.Module):
    """Blocks that all read what the first one's norm gives."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Early() for _ in range(count))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [..., T] to [..., T, 4]."""
        x = self.embed(tokens)
        early = self.blocks[0].norm(x)  # type: ignore[union-attr, operator]
        for number in range(len(self.blocks)):
            x = self.blocks[number](x, early)
        return x


def test_blocks_that_have_to_do_with_others_than_their_neighbours_are_all_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = filled(Reaching(6))
    found = find_map(model)
    monkeypatch.setattr(layer_map, "lists_with_neighbours", lambda model: [])
    assert find_map(model) == found
    assert len(found.all_mlps()) == 6


class Block(nn.Sequential):
    """A residual block whose parts have numbers for names."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., 4] to the same shape."""
        return x + super().forward(x)


@pytest.mark.parametrize("nested", [False, True])
def test_blocks_whose_parts_are_numbered_are_carried_too(
    nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [
        Block(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(12)
    ]
    model = nn.Sequential(*blocks)
    model = filled(nn.Sequential(nn.Linear(4, 4), model) if nested else model)
    found = find_map(model, numbers(1, 4))
    names = [mlp.neurons.name for mlp in found.all_mlps()]
    assert names == [f"1.{n}" if nested else f"{n}" for n in range(12)]
    monkeypatch.setattr(layer_map, "lists_with_neighbours", lambda model: [])
    assert find_map(model, numbers(1, 4)) == found


def test_one_block_that_differs_is_found_among_those_that_are_alike() -> None:
    config = ModelConfig(vocabulary_size=11, width=16, layers=9, heads=2, mlp_width=24)
    model = llama.create(config, seed=0)
    LoRA(rank=2, targets=("model.layers.5.self_attn.q_proj",)).attach(model)
    found = map_of(model)
    assert [len(block.attentions) for block in found.blocks] == [1, 1, 1, 1, 1, 0, 1, 1, 1]
    assert [block.index for block in found.blocks] == list(range(9))
    assert {name.split(".")[2] for name in found.unknown if "layers" in name} == {"5"}
    assert "model.layers.5" in found.unknown["model.layers.5.self_attn"]


class Wrong(nn.Module):
    """What looks like an MLP, but neurons are not alike: each has its own function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.slopes = torch.arange(6.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., 4] to the same shape."""
        return self.down(torch.tanh(self.up(x) * self.slopes))


def test_a_wrong_claim_is_found_out_and_named() -> None:
    found = find_map(filled(Wrong()))
    assert not found.mlps
    assert "exchanging its units changed" in found.unknown["up"]
    assert found.unknown["down"]


def test_each_part_is_tried_though_others_have_its_shapes() -> None:
    wrong = Wrong()
    right = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    right.up, right.down = right[0], right[2]
    model = filled(nn.Sequential(nn.Linear(4, 4), right, nn.Linear(4, 4), wrong))
    found = find_map(model)
    assert [mlp.neurons.name for mlp in found.mlps] == ["1"]
    assert "changed what 3 computes" in found.unknown["3.up"]


def test_an_unknown_module_is_named_and_the_rest_is_found() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.LSTM(4, 4), nn.Identity())
    model[3].register_forward_hook(lambda module, args, out: out[0])
    found = find_map(filled(model), numbers(1, 3, 4))
    assert found.mlps[0].neurons.count == 8
    assert list(found.unknown) == ["3"]


def test_orders_and_choices_that_cannot_be_are_refused() -> None:
    model = decoder(heads=4, kv_heads=2)
    attention = map_of(model).all_attentions()[0]
    with pytest.raises(InputError, match="an order of 4 units"):
        permute(model, attention.heads, [0, 0, 1, 2])
    with pytest.raises(InputError, match="within runs of 2"):
        permute(model, attention.heads, [2, 1, 0, 3])
    with pytest.raises(InputError, match="the same number"):
        remove(model, attention.heads, [0])
    with pytest.raises(InputError, match="not all"):
        remove(model, attention.groups, [0, 1])
    with pytest.raises(InputError, match="must name some of 2 groups"):
        silence(model, attention.groups, [2])
    stream = map_of(model).stream
    assert stream is not None
    with pytest.raises(InputError, match="norms take the mean"):
        remove(model, stream, [0])
    with pytest.raises(InputError, match="gives no example"):
        find_map(nn.GRU(2, 2))


def test_nothing_of_the_model_is_changed() -> None:
    model = decoder(heads=2).train()
    before = copy.deepcopy(model.state_dict())
    find_map(model)
    assert model.training
    assert model.model.layers[0].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
