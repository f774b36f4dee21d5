"""What rules keep: any shape and dtype, in few bits or many, and its bytes to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from modicum.optim.kept import KeptTensor, opened
from modicum.optim.quantized import BLOCK, SMALLEST, dequantize
from modicum.proofs.contracts.optim.subjects import numbers

CPU = torch.device("cpu")


def nbytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize(
    ("elements", "bits", "expected"),
    [
        (SMALLEST, 32, 4 * SMALLEST),
        (SMALLEST, 16, 2 * SMALLEST),
        (SMALLEST - 1, 8, 4 * (SMALLEST - 1)),
        (SMALLEST, 8, SMALLEST + 4 * SMALLEST // BLOCK),
        (SMALLEST + 1, 8, SMALLEST + 1 + 4 * (SMALLEST // BLOCK + 1)),
    ],
)
def test_bytes_are_those_of_the_tensors(elements: int, bits: int, expected: int) -> None:
    state: dict[str, Tensor] = {}
    kept = {"m": KeptTensor((elements,))}
    with opened(state, kept, CPU, bits) as found:
        found["m"].fill_(2.0)
    assert kept["m"].nbytes(bits) == nbytes(state) == expected
    assert len(state) == (2 if bits == 8 and expected < 4 * elements else 1)
    assert kept["m"].copied(bits) == (0 if expected == 4 * elements else 4 * elements)


def test_fp32_moments_are_changed_in_place() -> None:
    state: dict[str, Tensor] = {}
    kept = {"m": KeptTensor((3, 2)), "v": KeptTensor((3, 2), squared=True)}
    with opened(state, kept, CPU, 8) as found:
        found["m"].fill_(1.0)
    first = state["m"]
    with opened(state, kept, CPU, 8) as found:
        found["m"].add_(1.0)
    assert state["m"] is first
    assert torch.equal(first, torch.full((3, 2), 2.0))
    assert torch.equal(state["v"], torch.zeros(3, 2))


def test_tensors_of_other_shapes_dtypes_and_bits_are_kept_next_to_each_other() -> None:
    kept = {
        "moment": KeptTensor((64, 80)),
        "square": KeptTensor((64, 80), squared=True, bits=16),
        "block": KeptTensor((64, 1), squared=True),
        "place": KeptTensor((5000,), torch.int64),
        "left": KeptTensor((2, 64, 64), torch.float64, bits=32),
        "seen": KeptTensor((), torch.bool),
    }
    state: dict[str, Any] = {}
    given = {
        "moment": numbers(64, 80, name="moment"),
        "square": numbers(64, 80, name="square").square(),
        "block": numbers(64, 1, name="block").square(),
        "place": torch.arange(5000),
        "left": numbers(2, 64, 64, name="left").double() * (1 + 1e-12),
        "seen": torch.tensor(True),
    }
    for _ in range(2):
        with opened(state, kept, CPU, 8) as found:
            assert {name: tensor.dtype for name, tensor in found.items()} == {
                name: one.dtype for name, one in kept.items()
            }
            for name, values in given.items():
                found[name].copy_(values)
    dtypes = torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float64, torch.bool
    assert tuple(state[name].dtype for name in kept) == dtypes
    assert nbytes(state) == sum(one.nbytes(8) for one in kept.values())
    for name in ("block", "place", "left", "seen"):
        assert torch.equal(state[name], given[name])
    assert torch.equal(state["square"], given["square"].bfloat16())
    back = dequantize(state["moment"], state["moment_scale"], signed=True)
    assert 0 < (back - given["moment"]).abs().max() < 0.01 * given["moment"].abs().max()
