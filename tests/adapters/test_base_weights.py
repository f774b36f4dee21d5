"""The weight that a file has for a layer is given as the layer's, whatever form that has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoders import decoder_folder
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from modicum.adapters import PiSSA, SVFit
from modicum.adapters.base import Adapter
from modicum.adapters.base_weights import given, read
from modicum.adapters.svfit import SVFitLayer
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.formed_model import FormedModel, stands_for_transposed
from modicum.models import load
from modicum.models.huggingface import reader
from modicum.proofs.contracts.adapters.subjects import distance, numbers

SQUARE = numbers(8, 8, name="W")


def quantized(kind: type[nn.Module]) -> nn.Sequential:
    """A square layer of the weight `SQUARE`, in four bits."""
    layer = kind(8, 8)
    layer.load_state_dict({"weight": of_the_file(kind), "bias": numbers(8, name="b")})
    model = nn.Sequential(layer)
    formed = FormedModel(model, FormPlan().with_form("0", "nf4"))
    formed.convert()
    formed.close()
    return model


def of_the_file(kind: type[nn.Module]) -> Tensor:
    """`SQUARE` as layers of a kind store it."""
    return SQUARE.T if kind is Conv1D else SQUARE


@pytest.mark.parametrize("kind", [Conv1D, nn.Linear])
@pytest.mark.parametrize("value", [PiSSA(rank=3), SVFit(rank=3)], ids=lambda v: v.info.name)
def test_a_square_weight_is_split_as_the_layer_has_it(
    kind: type[nn.Module], value: Adapter
) -> None:
    model = quantized(kind)
    assert stands_for_transposed(model[0]) == (kind is Conv1D)
    adapter = value.attach(model, weights=lambda name: of_the_file(kind))
    [(name, layer)] = adapter.layers()
    site = adapter.sites[name]
    assert torch.equal(given(lambda name: of_the_file(kind), site, model[0]), SQUARE)
    if isinstance(layer, SVFitLayer):
        left, _, right = torch.linalg.svd(SQUARE)
        torch.testing.assert_close(layer.up @ layer.down, left[:, :3] @ right[:3])
    else:
        assert distance(layer.taken() + read(model[0], site), SQUARE) < 0.1


def test_a_file_of_gpt2_is_split_as_the_model_in_four_bits_has_it(tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path / "gpt2", "gpt2")
    model, dense = load(folder, linear="nf4"), load(folder)
    adapter = PiSSA(rank=4, targets=("attn.c_proj",)).attach(model, weights=reader(folder))
    assert len(adapter.sites) == 2
    for name, layer in adapter.layers():
        weight = dense.get_submodule(name).get_parameter("weight").detach().T
        assert weight.shape == (32, 32)
        split = layer.taken() + read(model.get_submodule(name), adapter.sites[name])
        assert distance(split, weight) < 0.1
