"""DCT-AdamW: Adam in a turned basis, the authors' loop, error feedback, what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.optim import DCTAdamW, GaLore
from modicum.optim.dct import dct_basis
from modicum.optim.rules import Unchanged
from modicum.proofs.contracts.optim.subjects import numbers

SHAPES = ((9, 6), (6, 9), (7, 7))


def gradient(step: int, *shape: int) -> Tensor:
    return numbers(*shape, name=f"gradient {step}") + 0.3 * numbers(*shape, name="drift")


def run(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: int) -> None:
    for step in range(steps):
        weight.grad = gradient(step, *weight.shape)
        optimizer.step()


@pytest.mark.parametrize("transform", ["fft", "product"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_at_full_rank_it_is_adam_in_the_basis(shape: tuple[int, int], transform: Any) -> None:
    adam: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.1}
    weight = nn.Parameter(numbers(*shape))
    run(DCTAdamW([weight], rank=min(shape), transform=transform, epsilon=1e-3, **adam), weight, 20)
    basis, tall = dct_basis(min(shape), torch.device("cpu")), shape[0] >= shape[1]

    def turned(matrix: Tensor) -> Tensor:
        return matrix @ basis.T if tall else basis @ matrix

    other = nn.Parameter(turned(numbers(*shape)))
    theirs = torch.optim.AdamW([other], eps=1e-3, foreach=False, **adam)
    for step in range(20):
        other.grad = turned(gradient(step, *shape))
        theirs.step()
    torch.testing.assert_close(turned(weight.detach()), other.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_at_full_rank_without_moments_it_is_plain_descent(shape: tuple[int, int]) -> None:
    one, other = (nn.Parameter(numbers(*shape)) for _ in range(2))
    ours = DCTAdamW([one], lr=0.1, rank=min(shape))
    ours.parts = replace(ours.parts, inner=Unchanged())
    run(ours, one, 20)
    run(torch.optim.SGD([other], lr=0.1), other, 20)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("gap", "feedback"), [(1, False), (1, True), (4, True), (4, False)])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24)], ids=str)
def test_twenty_steps_are_the_authors_loop(
    shape: tuple[int, int], gap: int, feedback: bool
) -> None:
    weight = nn.Parameter(numbers(*shape))
    rate, decay, first, second, epsilon = 0.02, 0.1, 0.9, 0.999, 1e-8
    optimizer = DCTAdamW(
        [weight], lr=rate, rank=5, update_gap=gap, weight_decay=decay,
        feedback_bits=32 if feedback else 0,
    )  # fmt: skip
    tall = shape[0] >= shape[1]
    # The loop is that of tall matrices; the others are its mirror image.
    theirs = (weight.detach() if tall else weight.detach().T).double()
    columns, error = dct_basis(16, torch.device("cpu")).T.double(), torch.zeros_like(theirs)
    mean, square = torch.zeros(24, 5).double(), torch.zeros(24, 5).double()
    chosen: Tensor | None = None
    for step in range(20):
        full = gradient(step, *shape)
        weight.grad = full.clone()
        total = (full if tall else full.T).double() + error
        if step % gap == 0:
            old, chosen = chosen, (total @ columns).abs().sum(0).topk(5).indices.sort().values
            if old is not None:
                # Zeros and ones, but for the rounding of the basis.
                turn = (columns[:, old].T @ columns[:, chosen]).round()
                mean, square = mean @ turn, (square @ turn).abs()
        assert chosen is not None
        low = total @ columns[:, chosen]
        if feedback:
            error = total - low @ columns[:, chosen].T
        mean = first * mean + (1 - first) * low
        square = second * square + (1 - second) * low**2
        young = (1 - second ** (step + 1)) ** 0.5
        direction = mean / (epsilon * young + square.sqrt())
        theirs = theirs * (1 - rate * decay)
        size = rate * young / (1 - first ** (step + 1))
        theirs = theirs - size * direction @ columns[:, chosen].T
        optimizer.step()
        found = weight.detach() if tall else weight.detach().T
        assert (found - theirs).abs().max() < 1e-5, step


def test_codes_of_the_error_stay_near_it() -> None:
    ends = {}
    for bits in (0, 4, 8, 32):
        weight = nn.Parameter(numbers(40, 30))
        optimizer = DCTAdamW([weight], lr=0.01, rank=6, feedback_bits=bits)  # type: ignore[arg-type]
        run(optimizer, weight, 10)
        ends[bits] = weight.detach() - numbers(40, 30)
    exact = ends[32]
    apart = {bits: ((ends[bits] - exact).norm() / exact.norm()).item() for bits in (0, 4, 8)}
    assert apart[8] < apart[4] < apart[0]
    assert apart[8] < 0.3


def test_a_matrix_keeps_whole_numbers_where_galore_keeps_a_basis() -> None:
    at = OptimizerQuery((TrainedParameter("weight", (64, 48), "matrix"),))
    ours = DCTAdamW.value(rank=8).ledger(at).bytes("optimizer")
    theirs = GaLore.value(rank=8).ledger(at).bytes("optimizer")
    assert ours == 4 + 2 * 4 * 64 * 8 + 4 * 8
    assert theirs - ours == 4 * 8 * 48 - 4 * 8
    for bits, carried in ((8, 64 * (48 + 8)), (4, 64 * (24 + 8)), (16, 2 * 64 * 48)):
        value = DCTAdamW.value(rank=8, feedback_bits=bits)
        assert value.ledger(at).bytes("optimizer") == ours + carried


def test_a_basis_is_counted_once_a_width() -> None:
    shapes = [("a", (64, 48)), ("b", (48, 64)), ("c", (48, 48)), ("d", (32, 64))]
    at = OptimizerQuery(tuple(TrainedParameter(n, shape, "matrix") for n, shape in shapes))
    entries = DCTAdamW.value(rank=8).ledger(at).entries
    [shared] = [one for one in entries if one.what == "bases that matrices share"]
    assert shared.bytes == 4 * (48**2 + 32**2)
