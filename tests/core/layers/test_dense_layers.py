from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.compress import FWSVD
from modicum.core.errors import InputError
from modicum.core.layers.dense_layers import all_layers, choose
from modicum.core.layers.layer_sites import Site
from modicum.core.layers.meta import on_meta
from modicum.linears import NF4, NF4Linear


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


def test_a_model_whose_layers_are_all_of_a_subclass_is_refused_with_its_class() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=50, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    with on_meta():
        model = transformers.FalconForCausalLM(config)
    why = "FalconLinear is a subclass of Linear, and a form replaces Linear itself alone"
    for plan in (NF4().plan, FWSVD(rank=2).plan):
        with pytest.raises(InputError, match=f"no dense linear layer to choose: {why}") as error:
            plan(model)
        assert error.value.field == "targets"
    with pytest.raises(InputError, match=f"no dense linear layer .* has this name; {why}"):
        NF4(targets=("query_key_value",)).plan(model)


def test_each_reason_why_no_layer_is_dense_is_said_once() -> None:
    model = nn.Sequential(Scaled(6, 6), Scaled(6, 6), NF4Linear(6, 6))
    with pytest.raises(InputError) as error:
        choose(model, ["all-linear"])
    first, second = error.value.problem.partition(": ")[2].split("; ")
    assert {first, second} == {
        "Scaled is a subclass of Linear that computes in its own way",
        "NF4Linear is another form already",
    }
    with pytest.raises(InputError, match=r"to choose$"):
        choose(nn.Sequential(nn.ReLU()), ["all-linear"])
