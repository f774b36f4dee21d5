from __future__ import annotations

import pytest
import torch
from pool import Pool
from torch import nn

from modicum.core.contracts.ledger import TrainedParameter
from modicum.core.contracts.parameters import (
    ParameterMetadata,
    classes,
    count,
    describe_parameter,
    matrices,
    metadata,
    optimizer_groups,
    trainable,
    trained_shapes,
)
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.parallel.sharded import Sharded


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 5, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    return model


def test_shared_parameters_count_once():
    model = tied()
    assert count(model) == (28, 28)
    model["norm"].requires_grad_(False)
    assert count(model) == (28, 20)
    assert [name for name, _ in trainable(model)] == ["embed.weight"]


def test_vectors_have_no_weight_decay_unless_told():
    model = tied()
    assert metadata(model["norm"].weight).weight_decay_multiplier == 0
    assert metadata(model["embed"].weight).weight_decay_multiplier == 1
    describe_parameter(model["norm"].weight, ParameterMetadata(2.0, 0.5))
    groups = optimizer_groups(model, learning_rate=0.1, weight_decay=0.4)
    found = {
        tuple(g["names"]): (g["lr"], g["base_learning_rate"], g["weight_decay"]) for g in groups
    }
    assert found == {
        ("embed.weight",): (0.1, 0.1, 0.4),
        ("norm.weight",): (0.2, 0.2, 0.2),
        ("norm.bias",): (0.1, 0.1, 0.0),
    }
    torch.optim.AdamW(groups)


class Headed(nn.Module):
    def __init__(self, name: str, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.ones(3, 4))
        setattr(self, name, nn.Linear(4, 5, bias=False))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        if tied:
            getattr(self, name).weight = self.embed.weight


def test_matrices_are_neither_embeddings_nor_heads() -> None:
    assert matrices(Headed("lm_head")) == {"inner.weight", "table"}
    assert matrices(Headed("out", tied=True)) == {"inner.weight", "table"}
    model = Headed("out")
    assert matrices(model) == {"inner.weight", "table", "out.weight"}
    model.get_output_embeddings = lambda: model.out
    assert matrices(model) == {"inner.weight", "table"}
    describe_parameter(model.table, ParameterMetadata(parameter_class="vector"))
    describe_parameter(model.embed.weight, ParameterMetadata(parameter_class="matrix"))
    assert matrices(model) == {"inner.weight", "embed.weight"}


def test_classes_follow_the_layers_a_tied_head_is_an_embedding() -> None:
    model = Headed("lm_head")
    model.kernel = nn.Conv1d(4, 4, 3)
    model.stack = nn.Parameter(torch.ones(2, 3, 4))
    expected = {
        "table": "matrix",
        "stack": "vector",
        "embed.weight": "embedding",
        "inner.weight": "matrix",
        "inner.bias": "vector",
        "lm_head.weight": "head",
        "kernel.weight": "convolution",
        "kernel.bias": "vector",
    }
    assert classes(model) == expected
    tied = classes(Headed("lm_head", tied=True))
    assert tied["embed.weight"] == "embedding"
    assert "lm_head.weight" not in tied
    describe_parameter(model.stack, ParameterMetadata(parameter_class="convolution"))
    assert classes(model)["stack"] == "convolution"


def test_groups_and_ledgers_are_told_of_matrices() -> None:
    model = Headed("lm_head").to(torch.bfloat16)
    groups = optimizer_groups(model, learning_rate=0.1, weight_decay=0.4)
    found = {name: group["matrix"] for group in groups for name in group["names"]}
    shapes = trained_shapes(model)
    assert found == {parameter.name: parameter.matrix for parameter in shapes}
    assert {name for name, matrix in found.items() if matrix} == matrices(model)
    each = [zip(group["names"], group["classes"], strict=True) for group in groups]
    listed = {name: kind for pairs in each for name, kind in pairs}
    assert listed == {parameter.name: parameter.parameter_class for parameter in shapes}
    known = {parameter.name: parameter for parameter in shapes}
    assert known["embed.weight"] == TrainedParameter("embed.weight", (5, 4), "embedding", 2)
    assert known["embed.weight"].bytes == 40
    assert [known["embed.weight"].rows(rank, 4) for rank in range(4)] == [2, 2, 1, 0]


def test_metadata_survives_getting_memory():
    with on_meta():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    said = ParameterMetadata(4.0, 0.5, kind="factor", group="late", holder=1)
    describe_parameter(model[1].weight, said)
    materialise(model, "cpu")
    assert metadata(model[1].weight) == said
    groups = optimizer_groups(model, learning_rate=1.0, weight_decay=0.1)
    found = {tuple(group["names"]): (group["lr"], group["kind"]) for group in groups}
    assert found[("1.weight",)] == (4.0, "factor")
    assert found[("0.weight",)] == (1.0, "")


def sharded_metadata(ranks: Ranks) -> list[str]:
    with on_meta():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for number, layer in enumerate(model):
        describe_parameter(layer.weight, ParameterMetadata(kind=f"layer {number}"))
    strategy = Sharded(ranks, Layout.of(ranks.size, ranks.size))
    strategy.cut(model, [model[0]], torch.device("cpu"))
    materialise(model, "cpu")
    groups = optimizer_groups(model, learning_rate=1.0, weight_decay=0.1)
    return sorted(str(group["kind"]) for group in groups)


@pytest.mark.ranks
def test_metadata_survives_sharding(pool: Pool):
    assert pool.run(sharded_metadata, ranks=2) == [["", "layer 0", "layer 1"]] * 2
