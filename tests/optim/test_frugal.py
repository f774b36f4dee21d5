"""FRUGAL: AdamW and signs at its ends, GaLore and BAdam without the residual, its budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.core.errors import InputError
from modicum.optim import FRUGAL, GaLore
from modicum.optim.projectors import FullSpace
from modicum.optim.subspaces import SubspaceStep
from modicum.proofs.contracts.optim.subjects import numbers

SHAPES = ((9, 6), (6, 9), (7, 7), (13, 1))
COPIED = ("tensors", "columns", "rows", "entries")


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(numbers(*shape, name=f"{shape}")) for shape in SHAPES]


def step(optimizer: torch.optim.Optimizer, given: list[nn.Parameter], number: int) -> None:
    for parameter in given:
        parameter.grad = numbers(*parameter.shape, name=f"{number} {parameter.shape}")
        parameter.grad[0] = 0.0
    optimizer.step()


@pytest.mark.parametrize("part", COPIED)
def test_with_all_of_the_gradient_it_is_our_adamw_to_the_bit_and_torchs_nearly(part: Any) -> None:
    shared: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    ours, same, theirs = parameters(), parameters(), parameters()
    optimizer = FRUGAL(ours, density=1.0, part=part, update_gap=100, **shared)
    full = FRUGAL(same, **shared)
    full.parts = replace(
        full.parts, projector=FullSpace(), choice=None, outside="nothing", on_refresh="keep"
    )
    torchs = torch.optim.AdamW(theirs, eps=1e-8, foreach=False, fused=False, **shared)
    for number in range(20):
        step(optimizer, ours, number)
        step(full, same, number)
        step(torchs, theirs, number)
    for one, two, three in zip(ours, same, theirs, strict=True):
        assert torch.equal(one, two)
        assert (one - three).abs().max() < 1e-6


@pytest.mark.parametrize("part", [*COPIED, "svd"])
def test_without_any_it_is_the_sign_on_matrices_and_adamw_on_the_others(part: Any) -> None:
    weight, vector, other = (
        nn.Parameter(numbers(9, 6)),
        *(nn.Parameter(numbers(13)) for _ in range(2)),
    )
    ours = FRUGAL(
        [weight, vector], lr=0.01, density=0.0, part=part, outside_scale=0.5, update_gap=3
    )
    theirs = torch.optim.AdamW([other], lr=0.01, weight_decay=0.0)
    expected = weight.detach().clone()
    for number in range(10):
        expected -= 0.01 * 0.5 * torch.sign(_zeroed(numbers(9, 6, name=f"{number} {weight.shape}")))
        step(ours, [weight, vector], number)
        step(theirs, [other], number)
    assert (weight - expected).abs().max() < 1e-6
    assert (vector - other).abs().max() < 1e-6
    assert sorted(ours.state[weight]) == ["step"]


def _zeroed(gradient: Tensor) -> Tensor:
    gradient[0] = 0.0
    return gradient


@pytest.mark.parametrize("part", ["columns", "rows", "entries"])
def test_inside_moves_as_adam_and_outside_by_the_rate(part: Any) -> None:
    weight = nn.Parameter(numbers(9, 6))
    before = weight.detach().clone()
    optimizer = FRUGAL([weight], lr=0.5, density=0.4, part=part, outside_scale=0.25)
    gradient = _zeroed(numbers(9, 6, name="gradient"))
    weight.grad = gradient.clone()
    optimizer.step()
    moved = before - weight.detach()
    places = optimizer.state[weight]["indices"].long()
    inside = torch.zeros(9, 6, dtype=torch.bool)
    {"columns": inside.T, "rows": inside, "entries": inside.view(-1)}[part][places] = True
    adam = 0.5 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(moved[inside], adam[inside], rtol=0, atol=1e-6)
    signs = 0.5 * 0.25 * gradient.sign()
    torch.testing.assert_close(moved[~inside], signs[~inside], rtol=0, atol=1e-6)
    assert not moved[0].any()


def test_without_the_residual_a_subspace_of_singular_vectors_is_galore() -> None:
    one, other = (nn.Parameter(numbers(24, 16)) for _ in range(2))
    ours = FRUGAL([one], lr=0.02, density=0.25, part="svd", outside="nothing", update_gap=4)
    theirs = GaLore([other], lr=0.02, rank=4, scale=1.0, on_refresh="reset", update_gap=4)
    theirs.parts = replace(theirs.parts, inner=ours.parts.inner)
    for number in range(12):
        step(ours, [one], number)
        step(theirs, [other], number)
    assert torch.equal(one, other)
    assert torch.equal(ours.state[one]["right"], theirs.state[other]["right"])


def test_without_the_residual_tensors_taking_turns_are_badam() -> None:
    ours, theirs = ([nn.Parameter(numbers(9, 6, name=f"{n}")) for n in range(4)] for _ in range(2))
    optimizer = FRUGAL(ours, lr=0.02, density=0.25, outside="nothing", update_gap=3)
    for number in range(14):
        round_, age = divmod(number, 3)
        block = 3 - round_ % 4
        if age == 0:  # the next block, and an Adam that knows nothing
            adam = torch.optim.AdamW([theirs[block]], lr=0.02, weight_decay=0.0, foreach=False)
        step(optimizer, ours, number)
        step(adam, [theirs[block]], number)
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert (one - other).abs().max() < 1e-6
            assert ("exp_avg" in optimizer.state[one]) == (index == block)


@pytest.mark.parametrize("part", ["columns", "svd", "orthogonal"])
def test_moments_and_their_age_begin_anew_with_the_part(part: Any) -> None:
    weight = nn.Parameter(numbers(12, 8))
    optimizer = FRUGAL([weight], lr=1.0, density=0.25, part=part, outside="nothing", update_gap=3)
    for number in range(4):
        before = weight.detach().clone()
        step(optimizer, [weight], number)
    state = optimizer.state[weight]
    inside = optimizer.parts.projector.down(weight.grad, state)
    torch.testing.assert_close(state["exp_avg"], 0.1 * inside, rtol=1e-5, atol=1e-6)
    # A first step of Adam has length one everywhere that it has a gradient.
    moved = optimizer.parts.projector.down(before - weight.detach(), state)
    torch.testing.assert_close(moved, inside.sign(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("fields", [
    {"order": "descending"}, {"order": "ascending"}, {"order": "mirror"}, {"order": "random"},
    {"part": "columns"}, {"part": "entries"}, {"part": "svd"},
], ids=str)  # fmt: skip
def test_bytes_are_never_over_what_the_plan_says(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((8, 8), (16, 8), (8, 16), (8, 8), (24, 8), (8, 8), (16, 16))
    weights = [nn.Parameter(numbers(*shape, name=f"{n}")) for n, shape in enumerate(shapes)]
    named = tuple(TrainedParameter(f"{n}", shape, "matrix") for n, shape in enumerate(shapes))
    value = FRUGAL.value(density=3 / 7, update_gap=2, **fields)
    said = value.ledger(OptimizerQuery(named)).bytes("optimizer")
    optimizer = value.bind([{"params": weights, "lr": 0.01}])
    found = []
    update = SubspaceStep.update

    def look(self: SubspaceStep, gradient: Tensor) -> Tensor:
        result = update(self, gradient)
        found.append(sum(t.nbytes for state in optimizer.state.values() for t in state.values()))
        return result

    monkeypatch.setattr(SubspaceStep, "update", look)
    for number in range(30):
        step(optimizer, weights, number)
    assert max(found) <= said
    if fields != {"order": "random"}:
        assert max(found) == said


def test_what_rounds_to_nothing_is_refused_before_anything_moves() -> None:
    weights = [nn.Parameter(numbers(4, 4)), nn.Parameter(numbers(4))]
    optimizer = FRUGAL(weights, density=0.25)
    with pytest.raises(InputError, match="density: of 1 matrices that is less than half of one"):
        step(optimizer, weights, 0)
    assert torch.equal(weights[1], numbers(4))
    at = OptimizerQuery((TrainedParameter("weight", (4, 4), "matrix"),))
    with pytest.raises(InputError, match="less than half of one"):
        FRUGAL.value(density=0.25).ledger(at)
    with pytest.raises(InputError, match="density"):
        FRUGAL.value(density=1.5)


def test_second_moments_in_8_bits_do_not_become_zero_by_rounding() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = FRUGAL([weight], lr=1e-3, density=1.0, state_bits=8)
    weight.grad = torch.zeros(64, 64)
    weight.grad[0, 0], weight.grad[0, 1] = 1.0, 3e-4
    optimizer.step()
    weight.grad = torch.zeros(64, 64)
    optimizer.step()
    # The first moment of the smaller one is there yet; over a second one of zero it would be 14.
    assert 0 < weight.detach().abs().max() < 0.01


def test_of_a_first_gradient_of_zeros_no_subspace_is_kept() -> None:
    late, fresh = (nn.Parameter(numbers(12, 8)) for _ in range(2))
    fields: dict[str, Any] = {"lr": 0.1, "density": 0.25, "part": "svd", "update_gap": 50}
    ours, other = FRUGAL([late], **fields), FRUGAL([fresh], **fields)
    late.grad = torch.zeros(12, 8)
    ours.step()
    assert torch.equal(late, numbers(12, 8))
    for number in range(3):
        step(ours, [late], number)
        step(other, [fresh], number)
    assert torch.equal(late, fresh)
