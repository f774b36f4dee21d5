"""Muon: PyTorch's updates, batches of equal shapes, Adam for all else, what a plan lists."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.parameters import optimizer_groups, trained_shapes
from modicum.core.errors import InputError
from modicum.optim import Muon, parts
from modicum.proofs.contracts.optim.subjects import TrainedOptimizer, assert_equal, llama, numbers

# Wide, tall, square, thin; two of one shape, and rows that are no multiple of anything.
SHAPES = ((24, 16), (16, 24), (16, 24), (40, 40), (7, 64), (1, 5))


def matrices() -> list[nn.Parameter]:
    named = enumerate(SHAPES)
    return [nn.Parameter(numbers(*shape, name=f"weight {index}")) for index, shape in named]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("factor", ["original", "match_rms_adamw"])
def test_twenty_steps_are_pytorchs(
    factor: Literal["original", "match_rms_adamw"], nesterov: bool
) -> None:
    ours, theirs = matrices(), matrices()
    shared: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov}
    optimizer = Muon(ours, product_dtype="bf16", shape_factor=factor, **shared)
    other = torch.optim.Muon(theirs, adjust_lr_fn=factor, **shared)
    for step in range(20):
        for index, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            gradient = numbers(*one.shape, name=f"{step} {index}") + 0.1 * two.detach()
            one.grad, two.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        other.step()
    for one, two in zip(ours, theirs, strict=True):
        assert (one - two).abs().max() < 1e-6


def test_what_is_no_matrix_goes_as_pytorchs_adamw_at_its_own_rate_and_decay() -> None:
    ours, theirs = (nn.Parameter(numbers(13)) for _ in range(2))
    optimizer = Muon(
        [ours], lr=0.1, weight_decay=0.4, adam_rate=0.5, adam_decay=0.25, adam_betas=(0.8, 0.9)
    )
    other = torch.optim.AdamW([theirs], lr=0.05, weight_decay=0.1, betas=(0.8, 0.9))
    for step in range(20):
        # A schedule of the group's rate is one of Adam's.
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        other.param_groups[0]["lr"] = 0.05 / (1 + step)
        ours.grad = numbers(13, name=f"{step}")
        theirs.grad = ours.grad.clone()
        optimizer.step()
        other.step()
    assert (ours - theirs).abs().max() < 1e-6


def test_batches_of_any_size_make_the_same_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for together in (1, 600, 10**6):
        monkeypatch.setattr("modicum.optim.base.TOGETHER", together)
        training = TrainedOptimizer(Muon.value())
        training.steps(0, 3)
        found.append(training.model)
    assert parts.TOGETHER > 10**6
    assert_equal(found[0], found[1], "in batches")
    assert_equal(found[0], found[2], "in one batch")


def test_classes_decide_whatever_names_say() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(9, 8), "wide": nn.Linear(8, 8)})
    optimizer = Muon(optimizer_groups(model, learning_rate=0.1, weight_decay=0.0))
    taken = [g["names"] for g in optimizer.param_groups if g["matrix"]]
    assert taken == [["wide.weight"]]
    assert [g["classes"] for g in optimizer.param_groups if g["matrix"]] == [["matrix"]]


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_what_a_plan_lists_adds_up_to_the_state(bits: Literal[32, 16, 8]) -> None:
    value = Muon.value(state_bits=bits)
    at = OptimizerQuery(trained_shapes(llama(width=72, mlp_width=200)))
    rows = {each.parameter_class: each for each in value.treats(at)}
    assert sorted(rows) == ["embedding", "matrix", "vector"]
    assert sum(each.parameters for each in rows.values()) == len(at.parameters)
    assert sum(each.bytes for each in rows.values()) == value.ledger(at).bytes("optimizer")
    assert rows["matrix"].rule == "Muon"
    assert rows["vector"].rule == "Adam at 0.2 of the rate"


def test_fields_out_of_bounds_are_refused() -> None:
    for fields in ({"steps": 0}, {"momentum": 1.0}, {"coefficients": (1.0, 2.0)}):
        with pytest.raises(InputError, match=next(iter(fields))):
            Muon.value(**fields)
    assert Muon.value(coefficients=[1.0, 2.0, 3.0]).fields()["coefficients"] == (1.0, 2.0, 3.0)
