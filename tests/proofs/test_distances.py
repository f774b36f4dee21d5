"""Of several distances the worst, wherever one stands that is no number."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch

from modicum.proofs.contracts.comm.subjects import furthest
from modicum.proofs.distances import worst


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_what_is_no_number_is_the_worst_wherever_it_stands(spoilt: float) -> None:
    for distances in permutations((0.5, spoilt, 0.0)):
        assert worst(distances) == math.inf
    assert worst((0.5, 0.25)) == 0.5
    with pytest.raises(ValueError, match="empty"):
        worst(())


def test_a_weight_that_is_no_number_is_the_furthest() -> None:
    one = {"first": torch.zeros(2), "last": torch.tensor([0.0, math.nan])}
    assert furthest(one, {"first": torch.ones(2), "last": torch.zeros(2)}) == math.inf
    assert furthest(one, {"first": torch.ones(2), "last": one["last"]}) == math.inf
    del one["last"]
    assert furthest(one, {"first": torch.ones(2)}) == 1.0
