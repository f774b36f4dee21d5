"""What is carried over: codes by row, and sums that telescope."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modicum.optim.carried import CarriedBits, CarriedOver
from modicum.optim.dct import DCTProjector
from modicum.proofs.contracts.optim.subjects import numbers


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("shape", [(9, 6), (7, 5), (1, 1), (3, 40)], ids=str)
def test_codes_are_within_half_a_step(shape: tuple[int, int], bits: CarriedBits) -> None:
    carried, state = CarriedOver(bits=bits), {}
    values = numbers(*shape)
    carried.close(state, values.clone())
    found = carried.open(state, shape)
    step = values.amax(1) - values.amin(1)
    # bf16 has eight bits of precision.
    bound = {4: step / 15 / 2, 8: step / 255 / 2, 16: values.abs().amax(1) / 256, 32: step * 0}
    assert bool(((found - values).abs().amax(1) <= bound[bits] + 1e-6).all())
    assert sum(kept.nbytes for kept in state.values()) == carried.nbytes(shape)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_equal_numbers_come_back_as_they_are(bits: CarriedBits) -> None:
    carried, state = CarriedOver(bits=bits), {}
    values = torch.tensor([[0.0] * 5, [-3.25] * 5])
    carried.close(state, values.clone())
    assert torch.equal(carried.open(state, (2, 5)), values)


@pytest.mark.parametrize(("before", "after"), [(16, 32), (32, 16)])
def test_what_was_kept_in_other_bits_has_these_after_a_step(
    before: CarriedBits, after: CarriedBits
) -> None:
    carried, state = CarriedOver(bits=after), dict[str, Any]()
    CarriedOver(bits=before).close(state, numbers(9, 6))
    carried.close(state, carried.open(state, (9, 6)).mul_(1 + 1e-6))
    assert state["error"].nbytes == carried.nbytes((9, 6))


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)], ids=str)
def test_what_was_applied_and_what_is_left_are_the_sum_of_gradients(shape: tuple[int, int]) -> None:
    carried, projector, state = CarriedOver(), DCTProjector(2), dict[str, Any]()
    applied, gradients = torch.zeros(shape), torch.zeros(shape)
    for step in range(12):
        gradient = numbers(*shape, name=f"{step}")
        gradients += gradient
        total = carried.open(state, shape).add_(gradient)
        bases, inside = projector.refresh(total, step, 0)
        applied += projector.up(inside, bases, shape)
        carried.close(state, projector.outside(total, inside, bases))
    torch.testing.assert_close(applied + state["error"], gradients, rtol=0, atol=1e-5)
    assert state["error"].norm() < gradients.norm()
