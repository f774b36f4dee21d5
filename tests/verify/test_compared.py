"""How far two tensors are apart, also where there are no numbers in them."""

from __future__ import annotations

import math

import pytest
import torch

from modicum.verify.compared import tensor_distance

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_no_number_is_far_from_all_but_its_own_bits(dtype: torch.dtype) -> None:
    finite = torch.tensor([1.0, 2.0], dtype=dtype)
    for spoilt in (math.nan, math.inf):
        broken = torch.tensor([1.0, spoilt], dtype=dtype)
        assert tensor_distance(broken, broken.clone()) == 0.0
        assert tensor_distance(finite, broken) == math.inf
        assert tensor_distance(broken, finite) == math.inf
        assert tensor_distance(broken, torch.tensor([2.0, spoilt], dtype=dtype)) == math.inf


def test_signs_of_zero_and_tensors_of_other_kinds_are_compared_as_before() -> None:
    assert tensor_distance(torch.zeros(2), -torch.zeros(2)) == 0.0
    assert tensor_distance(torch.zeros(2), torch.ones(2)) == math.inf
    assert tensor_distance(torch.tensor(3), torch.tensor(3)) == 0.0
    assert tensor_distance(torch.tensor([4, 0]), torch.tensor([4, 2])) == 0.5
    assert tensor_distance(torch.tensor([True]), torch.tensor([True])) == 0.0
    assert tensor_distance(torch.ones(6).view(2, 3).T, torch.ones(3, 2)) == 0.0
    for dtype in (torch.complex64, torch.complex128):
        value = torch.tensor([complex(1.0, math.nan)], dtype=dtype)
        assert tensor_distance(value, value.clone()) == 0.0
        assert tensor_distance(*torch.tensor([[3 + 4j], [3 + 2j]], dtype=dtype)) == 0.4
    assert tensor_distance(torch.ones(2), torch.ones(3)) == math.inf
    assert tensor_distance(torch.ones(2), torch.ones(2).double()) == math.inf
