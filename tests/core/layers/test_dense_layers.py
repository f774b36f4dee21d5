from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.dense_layers import all_layers, choose
from modicum.core.layers.layer_sites import Site
from modicum.core.layers.meta import on_meta


class Scaled(nn.Linear):
    """A linear layer with a use of its weight that is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Scaled(6, 6))
        self.first, self.second = block, block
        self.attention = nn.MultiheadAttention(6, 2)
        self.lm_head = nn.Linear(6, 9, bias=False)


def names(model: nn.Module, *targets: str, exclude: tuple[str, ...] = ()) -> list[str]:
    return [layer.name for layer in choose(model, targets, exclude)]


def test_dense_layers_alone_each_once_with_all_its_names() -> None:
    assert all_layers(Blocks()) == {
        "first.0": Site("first.0", "linear", 6, 6, dense=True, names=("first.0", "second.0")),
        "lm_head": Site("lm_head", "linear", 6, 9, dense=True, names=("lm_head",)),
    }


def test_the_head_is_taken_only_by_its_name() -> None:
    model = Blocks()
    assert names(model, "all-linear") == ["first.0"]
    assert names(model, "all-linear", "lm_head") == ["first.0", "lm_head"]
    assert names(model, "lm_*") == ["lm_head"]
    assert names(model, "0", "lm_head", exclude=("lm_head",)) == ["first.0"]


def test_no_memory_is_needed() -> None:
    with on_meta():
        model = Blocks()
    assert names(model, "all-linear") == ["first.0"]


def test_a_tied_weight_is_refused_where_it_is_named() -> None:
    model = Blocks()
    model.lm_head.weight = model.embed.weight
    assert names(model, "all-linear") == ["first.0"]
    with pytest.raises(InputError, match=r"used by another layer too.*lm_head"):
        choose(model, ["lm_head"])


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no dense linear layer.*Did you mean 'lm_head'"):
        choose(Blocks(), ["lm_haed"])
    with pytest.raises(InputError, match="excluded again"):
        choose(Blocks(), ["all-linear"], ["0"])


def test_gpt2s_transposed_layers_count() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(8, 3))
    assert all_layers(model)["0"] == Site("0", "linear", 3, 8, True, dense=True, names=("0",))
    assert torch.Size([3, 8]) == model[0].weight.shape
    assert transformers.__version__


def test_a_layer_whose_weight_another_module_uses_is_left_out_or_refused() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 4))
    assert [layer.name for layer in choose(model, ["all-linear"])] == ["1"]
    with pytest.raises(InputError, match="TransformerEncoderLayer uses its weight"):
        choose(model, ["linear1"])
