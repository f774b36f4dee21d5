"""Groups of FSDP2 whose gradients an exchange of matrices sums: one call in the last pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.parallel.sharded_matrices import MatrixGroup

ROWS = torch.arange(6.0)


@pytest.fixture
def group() -> MatrixGroup:
    """Of one rank, so that it owns all rows."""
    return MatrixGroup("block", {"weight": (2, 3)}, MatrixExchange(), lambda: None, lambda: None)


def called(group: MatrixGroup) -> Tensor:
    """FSDP2's call for the gradients of a block; its output."""
    output = torch.full((6,), -1.0)
    group(output, ROWS.clone())
    return output


def test_a_block_that_runs_twice_is_refused_in_the_last_pass(group: MatrixGroup) -> None:
    group.last = False
    for _ in range(2):  # such sums are added up, and begin to travel in the last pass
        assert not called(group).any()
    group.last = True
    output = called(group)
    with pytest.raises(InputError, match=r"more than once in a forward pass.*to zero") as refusal:
        called(group)
    assert (refusal.value.field, refusal.value.value) == ("comm.method", "block")
    group.land()
    assert torch.equal(output, 3 * ROWS)


def test_after_it_each_update_has_its_call(group: MatrixGroup) -> None:
    called(group)
    with pytest.raises(InputError, match="more than once"):
        called(group)
    group.clear()
    for _ in range(2):
        output = called(group)
        group.land()
        assert torch.equal(output, ROWS)
