"""State that an optimizer does not keep is refused; floats of other bits are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.optim import (
    FRUGAL,
    SGD,
    SOAP,
    AdamW,
    AdamW8bit,
    DCTAdamW,
    GaLore,
    Lion,
    Muon,
    NAdamW,
)
from modicum.proofs.contracts.optim.subjects import numbers

SHAPE = (64, 64)
Made = tuple[Any, dict[str, Any]]
CODED: Made = GaLore, {"rank": 64, "state_bits": 8}
PAIRS: list[tuple[Made, Made, str]] = [
    (CODED, (GaLore, {"rank": 64}), "exp_avg_sq_scale"),
    ((GaLore, {"rank": 64}), CODED, "exp_avg_sq_scale"),
    ((GaLore, {"rank": 8}), (GaLore, {"rank": 4}), r"exp_avg \(64, 8\) float32"),
    ((GaLore, {"rank": 8}), (GaLore, {"rank": 8, "side": "left"}), "right"),
    ((DCTAdamW, {"rank": 8, "feedback_bits": 8}), (DCTAdamW, {"rank": 8}), "error_least"),
    ((SOAP, {}), (NAdamW, {}), "left_basis"),
    ((NAdamW, {}), (GaLore, {"rank": 8}), r"exp_avg \(64, 64\)"),
    ((Muon, {}), (NAdamW, {}), "momentum_buffer"),
    ((AdamW, {}), (AdamW8bit, {}), "uint8"),
    ((AdamW8bit, {}), (AdamW8bit, {"smallest": 5000}), "uint8"),
    ((AdamW, {}), (NAdamW, {}), "its groups have no matrix"),
    ((FRUGAL, {"density": 0.0}), (GaLore, {"rank": 8}), "is nothing, and this optimizer keeps"),
    ((AdamW8bit, {}), (Lion, {}), "uint8"),
    ((AdamW, {}), (Lion, {}), "exp_avg_sq"),
    ((GaLore, {"rank": 8}), (Lion, {}), "its groups have no betas"),
    ((AdamW8bit, {}), (AdamW, {}), "uint8"),
    ((Lion, {}), (AdamW, {}), "its groups have no eps"),
    ((AdamW, {}), (SGD, {}), "its groups have no dampening"),
]


def stepped(made: Made, saved: dict[str, Any] | None = None) -> torch.optim.Optimizer:
    """An optimizer of one matrix after a step, which begins from what was saved."""
    kind, fields = made
    optimizer = kind([nn.Parameter(numbers(*SHAPE))], lr=0.01, **fields)
    if saved is not None:
        optimizer.load_state_dict(saved)
    [weight] = optimizer.param_groups[0]["params"]
    weight.grad = numbers(*SHAPE, name="gradient")
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("before", "after", "said"), PAIRS, ids=str)
def test_state_of_other_methods_or_fields_is_refused(before: Made, after: Made, said: str) -> None:
    saved = stepped(before).state_dict()
    kind, fields = after
    optimizer = kind([nn.Parameter(numbers(*SHAPE))], lr=0.25, **fields)
    with pytest.raises(InputError, match=rf"state_dict: .*{said}"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("bits", [(16, 32), (32, 16)], ids=str)
def test_floats_of_other_bits_are_taken(bits: tuple[int, int]) -> None:
    saved = stepped((GaLore, {"rank": 8, "state_bits": bits[0]})).state_dict()
    made: Made = (GaLore, {"rank": 8, "state_bits": bits[1], "projector_bits": bits[1]})
    optimizer = stepped(made, saved)
    [state] = optimizer.state.values()
    assert state["step"] == 2
    assert state["exp_avg"].dtype == {32: torch.float32, 16: torch.bfloat16}[bits[1]]


def test_a_matrix_whose_turn_has_not_come_has_nothing() -> None:
    weights = [nn.Parameter(numbers(6, 4, name=f"{n}")) for n in range(2)]
    optimizer, other = (FRUGAL(weights, density=0.5, update_gap=4) for _ in range(2))
    for weight in weights:
        weight.grad = numbers(6, 4, name="gradient")
    optimizer.step()
    assert sorted(map(len, optimizer.state.values())) == [1, 3]
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert {float(state["step"]) for state in other.state.values()} == {2.0}


@pytest.mark.parametrize("kind", [AdamW, Lion, SGD])
def test_state_of_the_same_method_is_taken_in_the_dtype_of_the_weights(kind: Any) -> None:
    saved = stepped((kind, {})).state_dict()
    [weight] = weights = [nn.Parameter(numbers(*SHAPE).bfloat16())]
    optimizer = kind(weights, lr=0.01)
    optimizer.load_state_dict(saved)
    kept = {key: value for key, value in optimizer.state[weight].items() if key != "step"}
    assert kept.keys() == saved["state"][0].keys() - {"step"}
    for key, value in kept.items():
        assert torch.equal(value, saved["state"][0][key].bfloat16())
