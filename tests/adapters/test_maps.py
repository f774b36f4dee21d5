"""Which layers read a model's neurons and heads, by maps that are found once."""

from __future__ import annotations

import torch
from torch import nn

from modicum.adapters import LoRA
from modicum.adapters.maps import mapped_parts, units_read
from modicum.core.layers.map import KeptUnits, Reduction, map_of
from modicum.proofs.contracts.adapters.subjects import LLAMA, llama, numbers
from modicum.proofs.contracts.transformers_loop import hugging_face_llama


def test_units_are_those_of_the_map_by_the_models_names() -> None:
    model = llama()
    neurons, groups = units_read(model, "neurons"), units_read(model, "groups")
    assert list(neurons) == [f"model.layers.{n}.mlp.down_proj" for n in range(2)]
    assert list(groups) == [f"model.layers.{n}.self_attn.o_proj" for n in range(2)]
    for read in neurons.values():
        assert read.channels.flatten().tolist() == list(range(24))
        assert read.outputs == LLAMA.width
    for read in groups.values():
        assert torch.equal(read.channels, torch.arange(16).view(2, 8))
    inner = units_read(nn.ModuleDict({"decoder": hugging_face_llama()}), "groups")
    assert inner
    for name, read in inner.items():
        names = [name, *(piece.tensor for piece in read.units.slices)]
        assert all(each.startswith("decoder.model.layers.") for each in names)


def test_what_is_no_linear_layer_of_the_maps_size_reads_nothing() -> None:
    model = hugging_face_llama()
    assert units_read(model, "neurons")
    down = next(name for name in units_read(model, "neurons"))
    mlps = {mlp.down.tensor: mlp.neurons for mlp in map_of(model).all_mlps()}
    neurons = mlps[f"{down}.weight"]
    Reduction((KeptUnits(neurons, tuple(range(neurons.count - 2))),)).apply(model)
    assert down not in units_read(model, "neurons")
    assert units_read(nn.Sequential(nn.Linear(3, 3)), "neurons") == {}


def test_the_map_of_a_model_with_adapters_is_that_without() -> None:
    """Layers are of their own class meanwhile, and the pass that finds it is not the first."""
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 4))
    adapter = LoRA(rank=2).attach(model)
    kinds, hooks = [type(each) for each in model], dict(model._forward_pre_hooks)
    assert mapped_parts(model)[0].map.mlps[0].neurons.count == 12
    assert [type(each) for each in model] == kinds
    assert list(model._forward_pre_hooks.values()) == list(hooks.values())
    assert adapter.active
    model(numbers(2, 4))
    assert not model._forward_pre_hooks
