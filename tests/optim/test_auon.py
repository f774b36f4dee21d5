"""AuON by its equations: normalized or Nesterov's momentum SGD, and Muon with a brake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.optim import AuON, Muon
from modicum.optim.auon import AuonMode, brake
from modicum.proofs.contracts.optim.subjects import numbers

SHAPE = (24, 40)
SIZE = 24 * 40


def gradients(steps: int = 20, **fields: Any) -> list[Tensor]:
    return [numbers(*SHAPE, name=f"{step}", **fields) for step in range(steps)]


def went(optimizer: Any, weight: nn.Parameter, given: list[Tensor]) -> list[Tensor]:
    """What each step takes off the weight."""
    found = []
    for gradient in given:
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        optimizer.step()
        found.append(before - weight.detach())
    return found


def weight_of(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(0.1 * numbers(*SHAPE).to(dtype))


def test_twenty_steps_of_both_modes_are_the_authors() -> None:
    rate, mu, decay = 0.02, 0.95, 0.3
    both: tuple[tuple[AuonMode, float], ...] = (("paper", 1.0), ("code", 1.5))
    for mode, gamma in both:
        weight = weight_of()
        expected, moment = weight.detach().clone(), torch.zeros(SHAPE).double()
        optimizer = AuON([weight], lr=rate, momentum=mu, mode=mode, weight_decay=decay)
        for gradient in gradients(dtype=torch.float64):
            weight.grad = gradient.clone()
            optimizer.step()
            moment = mu * moment + (1 - mu) * gradient
            ahead = (1 - mu) * gradient + mu * moment
            x = ahead / (ahead.norm() + 1e-7)
            r = (gamma * x).cosh().square().mean().sqrt() + 1e-8
            step = x / r if mode == "paper" else ahead / r
            expected = (1 - rate * decay) * expected - rate * step
        # The brake of two sums is right to the fourth order in X.
        assert (weight - expected).abs().max() < 1e-9


def test_the_paper_is_normalized_momentum_sgd_and_does_not_mind_a_scale() -> None:
    weight = weight_of()
    steps = went(AuON([weight], lr=0.02), weight, gradients(dtype=torch.float64))
    moment = torch.zeros(SHAPE).double()
    for step, gradient in zip(steps, gradients(dtype=torch.float64), strict=True):
        moment = 0.95 * moment + 0.05 * gradient
        ahead = 0.05 * gradient + 0.95 * moment
        assert torch.cosine_similarity(step.flatten(), ahead.flatten(), 0) > 1 - 1e-12
        assert step.norm() == pytest.approx(0.02 / (1 + 1 / SIZE) ** 0.5, rel=1e-5)
        assert torch.linalg.matrix_norm(step, 2) <= step.norm() <= 0.02
    other = weight_of()
    scaled = [100 * gradient for gradient in gradients(dtype=torch.float64)]
    again = went(AuON([other], lr=0.02), other, scaled)
    assert all((a - b).abs().max() < 1e-8 for a, b in zip(steps, again, strict=True))


def test_the_code_is_nesterovs_momentum_sgd() -> None:
    ours, theirs = weight_of(), weight_of()
    given = gradients(dtype=torch.float64)
    mine = went(AuON([ours], lr=0.02, mode="code"), ours, given)
    sgd = torch.optim.SGD([theirs], lr=0.02 * 0.05, momentum=0.95, nesterov=True)
    for one, other in zip(mine, went(sgd, theirs, given), strict=True):
        ratio = (one / other).flatten()
        assert ratio.max() - ratio.min() < 1e-9
        assert ratio[0] == pytest.approx((1 + 1.5**2 / SIZE) ** -0.5, rel=1e-5)


def test_five_steps_are_muons_to_the_shape_factor_and_one_is_between() -> None:
    given = gradients()
    weights = [weight_of(torch.float32) for _ in range(3)]
    five, one, muon = (
        went(optimizer, weight, given)
        for optimizer, weight in zip(
            (
                AuON([weights[0]], lr=0.02, newton_schulz_steps=5),
                AuON([weights[1]], lr=0.02, newton_schulz_steps=1),
                Muon([weights[2]], lr=0.02),
            ),
            weights,
            strict=True,
        )
    )
    for mine, theirs in zip(five, muon, strict=True):
        # The brake of a matrix of orthonormal rows, next to the factor 1 of a wide one.
        assert torch.cosine_similarity(mine.flatten(), theirs.flatten(), 0) > 1 - 1e-6
        assert mine.norm() / theirs.norm() == pytest.approx((1 + 1 / 40) ** -0.5, rel=5e-3)

    def spread(steps: list[Tensor]) -> float:
        values = torch.linalg.svdvals(steps[-1])
        return (values[0] / values[-1]).item()

    plain = weight_of(torch.float32)
    none = went(AuON([plain], lr=0.02), plain, given)
    assert spread(five) < 2 < spread(one) < spread(none)


@pytest.mark.parametrize("gamma", [1.0, 1.5])
def test_the_brake_is_the_root_of_the_mean(gamma: float) -> None:
    values = numbers(64, 64, dtype=torch.float64)
    single = torch.zeros(64, 64).double()
    single[3, 5] = 1.0
    for x in (values / values.norm(), single, (values**5) / (values**5).norm()):
        exact = (gamma * x).cosh().square().mean().sqrt()
        found = brake(x.square().sum(), (x**4).sum(), x.numel(), gamma)
        assert found >= 1
        assert found == pytest.approx(exact.item(), abs=1e-6)
    x = values / values.norm()
    assert brake(x.square().sum(), (x**4).sum(), 4096, gamma) == pytest.approx(
        (1 + gamma**2 / 4096) ** 0.5, abs=1e-6
    )
    nothing = torch.zeros(())
    assert brake(nothing, nothing, 4, gamma) == 1


@pytest.mark.parametrize("steps", [0, 1])
def test_of_no_gradient_there_is_no_step(steps: int) -> None:
    weight = weight_of(torch.float32)
    (step,) = went(AuON([weight], newton_schulz_steps=steps), weight, [torch.zeros(SHAPE)])
    assert torch.equal(step, torch.zeros(SHAPE))


def test_two_numbers_a_matrix_travel_where_muon_gathers() -> None:
    shapes = tuple(TrainedParameter(f"{n}", (64, 32), "matrix") for n in range(3))
    at = OptimizerQuery(shapes, shards=2)
    (wire,) = AuON.value().ledger(at).wire
    assert (wire.collective, wire.bytes, wire.count) == ("all_reduce", 8 * 3, 1)
    (gathered,) = AuON.value(newton_schulz_steps=1).ledger(at).wire
    assert gathered.collective == "all_to_all"
    assert gathered.bytes >= 4 * 3 * 64 * 32 // 2


def test_one_step_is_a_quarter_of_muons_products_at_most() -> None:
    at = OptimizerQuery((TrainedParameter("w", (2048, 2048), "matrix"),))
    one, muon = (
        sum(work.flops for work in value.ledger(at).work)
        for value in (AuON.value(newton_schulz_steps=1), Muon.value())
    )
    assert 0 < one <= muon / 4
