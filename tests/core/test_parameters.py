from __future__ import annotations

import torch
from torch import nn

from modicum.core.parameters import (
    ParameterMetadata,
    count,
    describe_parameter,
    metadata,
    optimizer_groups,
    trainable,
)


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
