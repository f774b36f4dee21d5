"""A copy of a model and its optimizer is trained as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from modicum.core.contracts.catalog import catalog
from modicum.optim import AdamW8bit, Lion
from modicum.proofs.contracts.optim.subjects import (
    TrainedOptimizer,
    assert_equal,
    loss,
    small,
    tokens,
)

METHODS = {
    record.name: record.load()
    for record in catalog().values()
    if record.room == "optim" and record.info.slot == "optimizer"
}
KINDS = {name: kind for name, kind in METHODS.items() if hasattr(kind, "optimizer_class")}


def without_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("name", KINDS)
def test_a_copy_is_trained_as_what_it_is_of(name: str) -> None:
    training = TrainedOptimizer(small(KINDS[name]))
    training.steps(0, 2)
    model, optimizer = copy.deepcopy((training.model, training.optimizer))
    assert without_parameters(optimizer) == without_parameters(training.optimizer)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(parameter) for parameter in model.parameters()}
    for step in (2, 3, 4):
        loss(model, tokens(seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    training.steps(2, 5)
    assert_equal(training.model, model, "in the copy")


def test_a_copy_has_the_fields() -> None:
    layer = nn.Linear(4, 4)
    optimizer = AdamW8bit(layer.parameters(), smallest=16)
    assert copy.deepcopy(optimizer).smallest == 16
    lion = copy.deepcopy(Lion(layer.parameters(), betas=(0.5, 0.6)))
    assert lion.method == Lion.value(betas=(0.5, 0.6))


def test_a_group_may_be_added_to_a_copy() -> None:
    muon = KINDS["muon"].optimizer_class
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    layer, optimizer = copy.deepcopy((layer, muon(layer.parameters(), lr=0.1)))
    optimizer.add_param_group({"params": list(other.parameters())})
    assert [group["matrix"] for group in optimizer.param_groups] == [True, False, True, False]
    for parameter in (*layer.parameters(), *other.parameters()):
        parameter.grad = torch.ones_like(parameter)
    before = other.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(other.weight, before)
