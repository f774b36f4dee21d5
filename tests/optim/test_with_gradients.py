"""Which parameters are stepped, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.optim import SGD, AdamW8bit, GaLore, Lion, Muon, NAdamW


@pytest.mark.parametrize("kind", [AdamW8bit, GaLore, Lion, Muon, NAdamW])
def test_complex_parameters_are_refused_before_anything_moves(kind: Any) -> None:
    real, weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4, dtype=torch.cfloat))
    optimizer = kind([real, weight])
    for parameter in (real, weight):
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(InputError, match=r"complex parameters are not taken.*view_as_real"):
        optimizer.step()
    assert torch.equal(real, torch.ones(4))
    assert not optimizer.state


def test_sgd_is_pytorch_s_and_takes_them() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.cfloat))
    optimizer = SGD([weight], lr=0.5, momentum=0.9)
    weight.grad = torch.full((2,), 1 + 2j)
    optimizer.step()
    assert torch.equal(weight, torch.full((2,), -0.5 - 1j))
