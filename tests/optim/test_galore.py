"""GaLore against Adam, against momentum, and against the authors' loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.core.contracts.catalog import find
from modicum.core.contracts.ledger import OptimizerQuery as At
from modicum.core.contracts.ledger import TrainedParameter
from modicum.core.contracts.parameters import matrices, optimizer_groups
from modicum.core.errors import InputError
from modicum.core.random import normal_
from modicum.models import ModelConfig
from modicum.models.llama import Llama
from modicum.optim import GaLore, MatrixOptimizer, step_in_backward
from modicum.optim.parts import OptimizerParts
from modicum.optim.projectors import SVDProjector
from modicum.optim.quantized import dequantize
from modicum.optim.rules import Adam, Momentum


def numbers(*shape: int, name: str = "weight") -> Tensor:
    return normal_(torch.empty(shape), seed=0, name=name)


def gradient(step: int, *shape: int) -> Tensor:
    return numbers(*shape, name=f"gradient {step}") + 0.3 * numbers(*shape, name="drift")


def run(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        weight.grad = gradient(step, *weight.shape)
        optimizer.step()


class Projected(MatrixOptimizer):
    """Momentum in all of the space, by way of a basis of it."""

    info = find("galore").info

    def __init__(self, params: Any, lr: float = 0.1, *, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)

    @classmethod
    def parts_of(cls, value: Any) -> OptimizerParts:
        rule = Momentum(0.9)
        return OptimizerParts(SVDProjector(5), inner=rule, rest=rule, update_gap=100)


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (5, 5)], ids=str)
def test_momentum_at_full_rank_is_plain_momentum(shape: tuple[int, int]) -> None:
    one, other = (nn.Parameter(numbers(*shape)) for _ in range(2))
    ours, theirs = Projected([one]), torch.optim.SGD([other], lr=0.1, momentum=0.9)
    for step in range(20):
        one.grad = gradient(step, *shape)
        other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)
    assert "right" in ours.state[one] or "left" in ours.state[one]


def test_at_full_rank_it_is_adam_in_a_turned_basis() -> None:
    weight, turned = nn.Parameter(numbers(8, 5)), nn.Parameter(torch.empty(8, 5))
    optimizer = GaLore([weight], lr=0.1, rank=5, epsilon=1e-12, scale=1.0, update_gap=100)
    run(optimizer, weight, 1)
    basis = optimizer.state[weight]["right"]
    turned.data = numbers(8, 5) @ basis.T
    adam = torch.optim.AdamW([turned], lr=0.1, eps=1e-12, betas=(0.9, 0.999), weight_decay=0.0)
    for step in range(20):
        turned.grad = gradient(step, 8, 5) @ basis.T
        adam.step()
    run(optimizer, weight, 19, first=1)
    torch.testing.assert_close(weight.detach() @ basis.T, turned.detach(), rtol=1e-4, atol=1e-4)


def authors(
    weight: Tensor, steps: int, *, rank: int, gap: int, scale: float, rate: float, decay: float
) -> Tensor:
    """`galore_torch.AdamW` on one tall matrix, written out after its source."""
    first, second = torch.zeros(weight.shape[0], rank), torch.zeros(weight.shape[0], rank)
    for step in range(steps):
        full = gradient(step, *weight.shape)
        if step % gap == 0:
            basis = torch.linalg.svd(full, full_matrices=False)[2][:rank]
        low = full @ basis.T
        first.mul_(0.9).add_(low, alpha=0.1)
        second.mul_(0.999).addcmul_(low, low, value=0.001)
        size = rate * math.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        weight = weight - size * scale * (first / (second.sqrt() + 1e-6)) @ basis
        weight = weight - rate * decay * weight
    return weight


@pytest.mark.parametrize("gap", [50, 7])
def test_the_trajectory_is_the_authors(gap: int) -> None:
    # The same SVD on both sides, so that signs agree and refreshes may be compared too.
    weight = nn.Parameter(numbers(24, 16))
    optimizer = GaLore([weight], lr=0.01, rank=4, scale=0.25, update_gap=gap, weight_decay=0.1)
    run(optimizer, weight, 50)
    expected = authors(numbers(24, 16), 50, rank=4, gap=gap, scale=0.25, rate=0.01, decay=0.1)
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-5)


def change(rate: float, scale: float) -> Tensor:
    weight = nn.Parameter(numbers(9, 6))
    run(GaLore([weight], lr=rate, rank=2, scale=scale, update_gap=100), weight, 3)
    return weight.detach() - numbers(9, 6)


def test_alpha_and_the_learning_rate_enter_as_a_product() -> None:
    one = change(0.02, 0.25)
    torch.testing.assert_close(change(0.01, 0.5), one, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(change(0.02, 0.5), 2 * one, rtol=1e-4, atol=1e-6)


def test_an_update_has_the_rank_and_two_subspaces_have_twice_it() -> None:
    weight = nn.Parameter(torch.zeros(20, 16))
    optimizer = GaLore([weight], lr=0.1, rank=3, update_gap=2)
    ranks = []
    for step in range(4):
        before = weight.detach().clone()
        run(optimizer, weight, 1, first=step)
        ranks.append(int(torch.linalg.matrix_rank(weight.detach() - before, rtol=1e-4)))
    assert ranks == [3, 3, 3, 3]
    assert int(torch.linalg.matrix_rank(weight.detach(), rtol=1e-4)) == 6


def bases(optimizer: GaLore, weight: nn.Parameter, steps: int) -> list[int]:
    """The steps at which the basis changed."""
    found, before = [], None
    for step in range(steps):
        run(optimizer, weight, 1, first=step)
        now = optimizer.state[weight]["right"].clone()
        if before is None or not torch.equal(before, now):
            found.append(step)
        before = now
    return found


def test_refreshes_come_every_so_many_steps_and_may_be_staggered() -> None:
    weight = nn.Parameter(numbers(9, 6))
    assert bases(GaLore([weight], rank=2, update_gap=3), weight, 8) == [0, 3, 6]
    several = [nn.Parameter(numbers(9, 6, name=f"{n}")) for n in range(3)]
    optimizer = GaLore(several, rank=2, update_gap=6, stagger=True)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    before: list[Tensor | None] = [None] * 3
    for step in range(10):
        for number, weight in enumerate(several):
            weight.grad = gradient(10 * step + number, 9, 6)
        optimizer.step()
        for number, weight in enumerate(several):
            now, last = optimizer.state[weight]["right"], before[number]
            if last is None or not torch.equal(last, now):
                seen[number].append(step)
            before[number] = now.clone()
    assert seen == {0: [0, 6], 1: [0, 4], 2: [0, 2, 8]}


def test_what_becomes_of_moments_when_the_subspace_changes() -> None:
    def moments(on_refresh: str, steps: int) -> dict[str, Tensor]:
        weight = nn.Parameter(numbers(9, 6))
        optimizer = GaLore([weight], rank=2, update_gap=3, on_refresh=on_refresh)
        run(optimizer, weight, steps)
        return optimizer.state[weight]

    before = {name: value.clone() for name, value in moments("keep", 3).items()}
    fresh = moments("keep", 4)
    low = gradient(3, 9, 6) @ fresh["right"].T
    kept = 0.9 * before["exp_avg"] + 0.1 * low
    torch.testing.assert_close(fresh["exp_avg"], kept)
    reset = moments("reset", 4)
    torch.testing.assert_close(reset["exp_avg"], 0.1 * low)
    torch.testing.assert_close(reset["exp_avg_sq"], 0.001 * low.square())
    turn = before["right"] @ fresh["right"].T
    turned = moments("rotate", 4)
    torch.testing.assert_close(turned["exp_avg"], 0.9 * before["exp_avg"] @ turn + 0.1 * low)
    square = 0.999 * before["exp_avg_sq"] @ turn.square() + 0.001 * low.square()
    torch.testing.assert_close(turned["exp_avg_sq"], square)


def test_after_a_reset_the_bias_of_young_moments_is_corrected_anew() -> None:
    # A first step of Adam has length one in each of its entries, whatever the gradient.
    weight = nn.Parameter(torch.zeros(9, 6))
    optimizer = GaLore([weight], lr=1.0, rank=6, update_gap=3, scale=1.0, on_refresh="reset")
    run(optimizer, weight, 3)
    before = weight.detach().clone()
    run(optimizer, weight, 1, first=3)
    inside = (weight.detach() - before) @ optimizer.state[weight]["right"].T
    torch.testing.assert_close(inside.abs(), torch.ones(9, 6), rtol=1e-3, atol=1e-3)


def test_which_parameters_are_matrices() -> None:
    model = Llama(ModelConfig(vocabulary_size=29, width=8, layers=1, heads=2, mlp_width=12))
    optimizer = GaLore(optimizer_groups(model, learning_rate=0.1, weight_decay=0.1), rank=4)
    routed = {name: group["matrix"] for group in optimizer.param_groups for name in group["names"]}
    assert {name for name, matrix in routed.items() if matrix} == matrices(model)
    assert not any(routed[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert routed.keys() == dict(model.named_parameters()).keys()
    assert all(len(group["params"]) == len(group["names"]) for group in optimizer.param_groups)
    # By names alone: of groups without any, all that fit are matrices.
    layers = nn.ModuleDict(
        {"embed": nn.Embedding(9, 8), "wide": nn.Linear(8, 8), "thin": nn.Linear(8, 3)}
    )
    for given, expected in (
        (layers.named_parameters(), {(8, 8)}),
        (layers.parameters(), {(8, 8), (9, 8)}),
    ):
        groups = GaLore(given, rank=4).param_groups
        assert {tuple(p.shape) for g in groups if g["matrix"] for p in g["params"]} == expected
    groups = GaLore(layers.named_parameters(), rank=4, exclude=("wide.weight",)).param_groups
    assert {tuple(p.shape) for g in groups if g["matrix"] for p in g["params"]} == {(9, 8)}


def test_the_rest_is_plain_adam() -> None:
    one, other = (nn.Parameter(numbers(7, name="vector")) for _ in range(2))
    optimizer = GaLore([one], lr=0.1, rank=2, epsilon=1e-12)
    adam = torch.optim.AdamW([other], lr=0.1, eps=1e-12, weight_decay=0.0)
    run(optimizer, one, 10)
    run(adam, other, 10)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_8_bit_moments_stay_near_those_of_32() -> None:
    def trained(bits: int) -> tuple[Tensor, dict[str, Tensor]]:
        weight = nn.Parameter(numbers(130, 70))
        optimizer = GaLore([weight], lr=0.01, rank=40, update_gap=5, state_bits=bits)
        run(optimizer, weight, 12)
        return weight.detach() - numbers(130, 70), optimizer.state[weight]

    (exact, moments), (near, state) = trained(32), trained(8)
    assert {name: value.dtype for name, value in state.items() if "exp_avg" in name} == {
        "exp_avg": torch.uint8,
        "exp_avg_scale": torch.float32,
        "exp_avg_sq": torch.uint8,
        "exp_avg_sq_scale": torch.float32,
    }
    assert 0 < (exact - near).norm() / exact.norm() < 0.05
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        found = dequantize(state[name], state[f"{name}_scale"], signed=signed)
        assert (found - moments[name]).norm() / moments[name].norm() < 0.05


def test_moments_in_bf16_take_the_bytes_of_the_authors_and_stay_near() -> None:
    def trained(bits: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        weight, vector = (nn.Parameter(numbers(*shape)) for shape in ((13, 7), (7,)))
        before = weight.detach().clone()
        optimizer = GaLore(
            [weight, vector], lr=0.01, rank=4, update_gap=5, state_bits=bits, projector_bits=bits
        )
        vector.grad = numbers(7, name="of a vector")
        run(optimizer, weight, 12)
        return weight.detach() - before, optimizer.state[weight], optimizer.state[vector]

    (exact, *_), (near, state, rest) = trained(32), trained(16)
    kept = [value for name, value in [*state.items(), *rest.items()] if name != "step"]
    assert {value.dtype for value in kept} == {torch.bfloat16}
    # Two moments in the subspace, its basis, and two moments of the vector.
    assert sum(value.nbytes for value in kept) == 2 * (2 * 13 * 4 + 4 * 7 + 2 * 7)
    assert 0 < (exact - near).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_in_few_bits_survives_a_state_dictionary(dtype: torch.dtype, bits: int) -> None:
    def made() -> tuple[nn.Parameter, GaLore]:
        weight = nn.Parameter(numbers(130, 70).to(dtype))
        return weight, GaLore([weight], lr=0.01, rank=40, update_gap=5, state_bits=bits)

    def step(weight: nn.Parameter, optimizer: GaLore, first: int, steps: int) -> None:
        for number in range(first, first + steps):
            weight.grad = gradient(number, 130, 70).to(dtype)
            optimizer.step()

    (one, ours), (other, theirs) = made(), made()
    step(one, ours, 0, 7)
    other.data.copy_(one.data)
    theirs.load_state_dict(ours.state_dict())
    step(one, ours, 7, 7)
    step(other, theirs, 7, 7)
    assert torch.equal(one, other)
    assert ours.state[one]["right"].dtype == theirs.state[other]["right"].dtype == torch.float32


def test_small_updates_of_bf16_weights_are_made_in_fp32() -> None:
    # Computed in bf16, alpha times the direction would be rounded before it is subtracted.
    one, other = (
        nn.Parameter(numbers(9, 6).bfloat16()),
        nn.Parameter(numbers(9, 6).bfloat16().float()),
    )
    for weight in (one, other):
        optimizer = GaLore([weight], lr=0.05, rank=2)
        weight.grad = gradient(0, 9, 6).bfloat16().to(weight.dtype)
        optimizer.step()
    assert torch.equal(one.detach(), other.detach().bfloat16())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank: too small"),
        ({"rank": 2, "update_gap": 0}, "update_gap: too small"),
        ({"rank": 2, "state_bits": 4}, "state_bits: not one of the known words"),
        ({"rank": 2, "side": "both"}, "side: not one of the known words"),
        ({"rank": 2, "betas": (0.9, 1.0)}, "betas.1: too large"),
    ],
)
def test_wrong_hyper_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        GaLore([nn.Parameter(torch.ones(4, 4))], **fields)
    with pytest.raises(InputError, match=message):
        GaLore.value(**fields)


def test_the_value_and_its_traits() -> None:
    value, early = GaLore.value(rank=4), GaLore.value(rank=4, in_backward=True)
    assert "frees_gradient_in_backward" in early.traits - value.traits
    record = find("galore")
    assert record.traits({"rank": 4}) == value.traits
    assert record.traits({"in_backward": True}) == early.traits
    optimizer = early.bind([{"params": [nn.Parameter(torch.ones(5, 5))], "lr": 0.3}])
    assert isinstance(optimizer, GaLore)
    assert (optimizer.in_backward, optimizer.param_groups[0]["lr"]) == (True, 0.3)


def test_in_the_backward_pass_one_gradient_is_there_at_a_time() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = GaLore(model.parameters(), rank=4, in_backward=True)
    alive = []

    def look(_: Tensor) -> None:
        alive.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

    # Called first, as its hooks were there first.
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    stop = step_in_backward(optimizer)
    model(numbers(3, 16)).sum().backward()
    largest = max(p.nbytes for p in model.parameters())
    said = optimizer.method.ledger(
        At(tuple(TrainedParameter(n, tuple(p.shape), True) for n, p in model.named_parameters()))
    )
    assert max(alive) <= largest + 64  # a bias may be there beside a weight
    assert said.bytes("gradient") == largest
    stop()
    model(numbers(3, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_ledger_of_a_large_matrix_bounds_its_scratch_memory() -> None:
    from modicum.core.machine.memory import TensorMeter

    shape = (700, 300)
    for fields in (
        {"rank": 64},
        {"rank": 64, "state_bits": 8, "projector_bits": 16, "on_refresh": "rotate"},
        {"rank": 64, "state_bits": 16, "projector_bits": 16},
        {"rank": 64, "side": "full", "svd": "randomized"},
        {"rank": 300},
    ):
        for flip in (1, -1):
            weight = nn.Parameter(numbers(*shape[::flip]))
            value = GaLore.value(update_gap=1, **fields)
            optimizer = value.bind([{"params": [weight], "lr": 0.1}])
            run(optimizer, weight, 1)
            weight.grad = gradient(1, *weight.shape)
            with TensorMeter("cpu") as meter:
                optimizer.step()
            said = value.ledger(At((TrainedParameter("w", tuple(weight.shape), True),)))
            bound, peak = said.bytes("workspace"), meter.peak or 0
            assert peak <= bound <= 3 * peak, (fields, weight.shape, peak, bound)


def test_adam_says_what_its_moments_are() -> None:
    rule = Adam((0.9, 0.99), 1e-8)
    moments = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    direction, factor = rule.direction(torch.tensor([1.0, -2.0, 0.0]), moments, age=1)
    torch.testing.assert_close(direction * factor, torch.tensor([1.0, -1.0, 0.0]))
    assert rule.squared < moments.keys() == rule.moments.keys()
