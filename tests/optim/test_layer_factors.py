"""Inverse factors against dense inverses, in each form, and what keeps them bounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modicum.optim.layer_factors import InverseForm, RankOneInverse

FORMS: tuple[InverseForm, ...] = ("code", "average", "paper")


def vectors(count: int, width: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, width, generator=generator, dtype=torch.float64)


@given(width=st.integers(1, 9), decay=st.sampled_from([0.5, 0.9, 0.95]), seed=st.integers(0, 99))
def test_average_is_the_inverse_of_the_running_average(width: int, decay: float, seed: int) -> None:
    rule = RankOneInverse("average", decay, None, 0.9)
    average, inverse = (torch.eye(width, dtype=torch.float64) for _ in range(2))
    for vector in vectors(50, width, seed):
        average = decay * average + (1 - decay) * torch.outer(vector, vector)
        inverse = rule.refreshed(inverse, vector)
    dense = torch.linalg.inv(average)
    torch.testing.assert_close(inverse, dense, rtol=0, atol=1e-9 * float(dense.abs().max()))


@given(width=st.integers(1, 9), decay=st.sampled_from([0.5, 0.95]), seed=st.integers(0, 99))
def test_code_is_the_inverse_that_damps_what_it_takes_up(
    width: int, decay: float, seed: int
) -> None:
    rule, eye = RankOneInverse("code", decay, None, 0.9), torch.eye(width, dtype=torch.float64)
    inverse = eye.clone()
    for vector in vectors(50, width, seed, 3.0):
        near = torch.linalg.inv(decay * inverse + (1 - decay) * eye)
        inverse = rule.refreshed(inverse, vector)
        dense = torch.linalg.inv(near + torch.outer(vector, vector))
        torch.testing.assert_close(inverse, dense, rtol=0, atol=1e-9)


def test_paper_is_the_printed_equation_and_amplifies_what_the_code_damps() -> None:
    decay, (vector, other) = 0.95, vectors(2, 5, 0)
    before = torch.eye(5, dtype=torch.float64) + torch.outer(other, other)
    product = before @ vector
    printed = decay * before + (1 - decay) / (
        decay**2 * (1 + decay * (1 - decay) * vector @ product)
    ) * torch.outer(product, product)
    found = {
        form: RankOneInverse(form, decay, None, 0.9).refreshed(before.clone(), vector)
        for form in FORMS
    }
    torch.testing.assert_close(found["paper"], printed, rtol=1e-12, atol=1e-12)
    along = {form: float(vector @ inverse @ vector) for form, inverse in found.items()}
    assert along["paper"] > decay * float(vector @ before @ vector) > along["code"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("clamp", [1.0, 100.0])
def test_a_thousand_refreshes_stay_symmetric_positive_definite_and_finite(
    form: InverseForm, clamp: float
) -> None:
    """In fp16, where rounding moves eigenvalues, to the rounding; symmetric to the bit in both.

    The printed equation only stays finite: it shrinks to the smallest numbers that fp16 has, or
    of large vectors amplifies one direction without end.
    """
    rule = RankOneInverse(form, 0.95, 2.0, 0.9)
    exact, rounded = torch.eye(17, dtype=torch.float64), torch.eye(17, dtype=torch.float16)
    for vector in vectors(1000, 17, 1, clamp).clamp(-clamp, clamp):
        rule.take_up(exact, vector)
        rule.take_up(rounded, vector.float())
        assert torch.equal(exact, exact.T)
        assert torch.equal(rounded, rounded.T)
    assert rounded.isfinite().all()
    assert exact.isfinite().all()
    if form != "paper":
        assert torch.linalg.eigvalsh(exact).min() > 0
        lowest = torch.linalg.eigvalsh(rounded.double()).min()
        assert lowest > (0.0 if form == "average" else -0.01 * rule.decay * (1 - rule.decay))


def test_only_what_is_over_the_bound_is_brought_near_the_identity() -> None:
    rule, eye = RankOneInverse("code", 0.95, 2.0, 0.75), torch.eye(3)
    assert torch.equal(rule.stabilized(2 * eye), 2 * eye)
    assert torch.equal(rule.stabilized(4 * eye), 3.25 * eye)
    assert torch.equal(RankOneInverse("code", 0.95, 2.0, 0.0).stabilized(4 * eye), eye)
    assert torch.equal(RankOneInverse("code", 0.95, None, 0.0).stabilized(4 * eye), 4 * eye)
