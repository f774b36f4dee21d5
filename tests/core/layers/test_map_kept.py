"""Units that are kept: the small model, the full shapes again, and single tensors both ways."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from modicum.adapters import LoRA
from modicum.core.contracts.parameters import ParameterMetadata, describe_parameter, metadata
from modicum.core.errors import InputError
from modicum.core.layers.map import KeptUnits, ModelMap, Reduction, map_of, silence
from modicum.core.random import normal_
from modicum.models import create
from modicum.models.config import ModelConfig

TOKENS = torch.tensor([[1, 5, 2, 7, 3]])


def decoder(kv_heads: int = 2) -> nn.Module:
    config = ModelConfig(
        vocabulary_size=11, width=16, layers=2, heads=4, kv_heads=kv_heads, mlp_width=22,
        attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    model = create(config, seed=0)
    for name, parameter in model.named_parameters():
        normal_(parameter.data, seed=0, name=name, std=0.3)
    return model.eval()


def reduction(found: ModelMap) -> Reduction:
    first, second = found.blocks
    parts = [KeptUnits(first.attentions[0].groups, (1,))]
    parts += [KeptUnits(block.mlps[0].neurons, (0, 3, 4, 17, 21)) for block in (first, second)]
    return Reduction((*parts, KeptUnits(second.attentions[0].groups, (0, 1))))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_small_silenced_and_restored_compute_the_same(kv_heads: int) -> None:
    full, small = decoder(kv_heads), decoder(kv_heads)
    kept = reduction(map_of(full))
    if kv_heads == 4:
        kept = Reduction((*kept.parts[1:3], KeptUnits(kept.parts[0].units, (1, 3))))
    kept.apply(small)
    for part in kept.parts:
        assert sorted(part.kept + part.removed) == list(range(part.units.count))
        if part.removed:
            silence(full, part.units, part.removed)
    outputs = small(TOKENS)
    torch.testing.assert_close(outputs, full(TOKENS), rtol=1e-5, atol=1e-5)
    shapes = {name: tensor.shape for name, tensor in full.state_dict().items()}
    taken = copy.deepcopy(small.state_dict())
    kept.restore(small)
    assert {name: tensor.shape for name, tensor in small.state_dict().items()} == shapes
    torch.testing.assert_close(small(TOKENS), outputs, rtol=1e-5, atol=1e-5)
    assert small.config == full.config
    for name, tensor in small.state_dict().items():
        assert torch.equal(kept.reduced(name, tensor), taken[name]), name
        assert torch.equal(kept.restored(name, taken[name]), tensor), name


def test_what_was_removed_is_zero_in_the_full_shape() -> None:
    model = decoder()
    kept = reduction(map_of(model))
    name = "model.layers.0.self_attn.q_proj.weight"
    small = kept.reduced(name, model.get_parameter(name))
    assert torch.equal(small, model.get_parameter(name)[8:])
    full = kept.restored(name, small)
    assert full[:8].count_nonzero() == 0
    assert torch.equal(full[8:], small)


def test_what_is_known_of_a_parameter_stays_with_it() -> None:
    model = decoder()
    name = "model.layers.0.mlp.up_proj.weight"
    describe_parameter(model.get_parameter(name), ParameterMetadata(learning_rate_multiplier=3.0))
    kept = reduction(map_of(model))
    kept.apply(model)
    assert metadata(model.get_parameter(name)).learning_rate_multiplier == 3.0
    kept.restore(model)
    assert metadata(model.get_parameter(name)).learning_rate_multiplier == 3.0


@pytest.mark.parametrize("restored", [False, True])
def test_factors_of_the_small_model_are_those_of_the_full_one_at_what_was_kept(
    restored: bool,
) -> None:
    full, small = decoder(), decoder()
    kept = reduction(map_of(full)) if restored else Reduction(())
    kept.apply(small)
    adapter = LoRA(rank=2).attach(small)
    for name, factor in adapter.named_parameters():
        normal_(factor.data, seed=1, name=name, std=0.3)
    for part in kept.parts:
        if part.removed:
            silence(full, part.units, part.removed)
    untouched = copy.deepcopy(full.state_dict())
    for name, layer in adapter.layers():
        a, b, scale = layer.as_lora()
        wide_a, wide_b = kept.restored_factors(name, a, b)
        weight = full.get_parameter(f"{name}.weight")
        assert (wide_b @ wide_a).shape == weight.shape
        change = scale * wide_b @ wide_a
        there = kept.reduced(f"{name}.weight", change)
        torch.testing.assert_close(there, scale * b @ a, rtol=1e-6, atol=1e-6)
        zeros = kept.restored(f"{name}.weight", torch.ones_like(b @ a)) == 0
        assert change[zeros].count_nonzero() == 0
        if not restored:
            assert torch.equal(wide_a, a)
            assert torch.equal(wide_b, b)
        weight.data.add_(change)
    torch.testing.assert_close(full(TOKENS), small(TOKENS), rtol=1e-5, atol=1e-4)
    assert not torch.equal(untouched["model.layers.0.mlp.up_proj.weight"],
                           full.get_parameter("model.layers.0.mlp.up_proj.weight"))  # fmt: skip


def test_it_travels_as_json_and_other_models_are_refused() -> None:
    found = map_of(decoder())
    kept = reduction(found)
    raw = json.loads(json.dumps(kept.as_json()))
    again = Reduction.from_json(raw, found)
    assert {part.units.name: part.kept for part in again.parts} == {
        part.units.name: part.kept for part in kept.parts
    }
    mlp = "model.layers.0.mlp"
    for wrong in ([], {mlp: []}, {mlp: {"neurons": [22]}}, {mlp: {"groups": [0]}},
                  {mlp: {"neurons": 3}}, {"elsewhere": {"neurons": [0]}}):  # fmt: skip
        with pytest.raises(InputError):
            Reduction.from_json(wrong, found)


def test_what_cannot_be_removed_leaves_the_model_untouched() -> None:
    model = decoder()
    found = map_of(model)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    neurons, attention = found.blocks[0].mlps[0].neurons, found.blocks[0].attentions[0]
    fine = KeptUnits(neurons, (0, 1))
    for wrong in (
        KeptUnits(attention.groups, ()),
        KeptUnits(attention.heads, (0, 1, 2)),
        KeptUnits(neurons, (5,)),
    ):
        with pytest.raises(InputError):
            Reduction((fine, wrong)).apply(model)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
