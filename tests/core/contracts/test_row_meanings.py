"""State of rows that mean something else: sources that fit, state without rows, sharded state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from modicum.core.contracts.row_meanings import Sources, move_rows, move_state_rows
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.optim import AdamMini, AdamW, AdamW8bit, Lion, Muon
from modicum.proofs.contracts.optim.subjects import numbers

ROWS, COLUMNS = 9, 10
# Rows from one rank to another, and new ones on both.
SOURCES: Sources = [8, None, 2, 0, 4, None, 6, 7, 1]


def trained(ranks: Ranks | None, kind: Any, fields: dict[str, Any], sources: Sources) -> Tensor:
    """Two updates, rows moved, two more: of a matrix that is sharded over the ranks, if any."""

    def laid(tensor: Tensor) -> Tensor:
        if ranks is None:
            return tensor
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        return distribute_tensor(tensor, init_device_mesh("cpu", (ranks.size,)), [Shard(0)])

    matrix = nn.Parameter(laid(numbers(ROWS, COLUMNS, name="matrix")))
    optimizer = kind.value(**fields).bind([{"params": [matrix], "lr": 1e-2}])
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                move_rows(matrix, sources)
            assert move_state_rows(optimizer, matrix, sources)
        matrix.grad = laid(numbers(ROWS, COLUMNS, name=f"gradient {step}"))
        optimizer.step()
    return whole(matrix.detach())


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {}),
    (AdamW8bit, {"smallest": 16}),
    (AdamMini, {}),
    (Lion, {}),
    (Muon, {}),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "fields"), KINDS, ids=lambda each: getattr(each, "__name__", ""))
def test_ranks_move_rows_as_one_process(pool: Pool, kind: Any, fields: dict[str, Any]) -> None:
    expected = trained(None, kind, fields, SOURCES)
    for found in pool.run(trained, kind, fields, SOURCES, ranks=2):
        assert (found - expected).abs().max() < 1e-5
    # And the state is not what it would be without.
    alone = trained(None, kind, fields, list(range(ROWS)))
    assert (alone - expected).abs().max() > 1e-2


def test_moments_go_with_their_rows() -> None:
    matrix = nn.Parameter(numbers(4, 3))
    optimizer = AdamW([matrix], lr=1e-2)
    matrix.grad = numbers(4, 3, name="gradient")
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[matrix].items()}
    assert move_state_rows(optimizer, matrix, [3, None, 0, 2])
    for name in ("exp_avg", "exp_avg_sq"):
        now, then = optimizer.state[matrix][name], before[name]
        assert torch.equal(now, torch.stack([then[3], torch.zeros(3), then[0], then[2]]))
    assert optimizer.state[matrix]["step"] == 1
    kept = {name: value.clone() for name, value in optimizer.state[matrix].items()}
    assert move_state_rows(optimizer, matrix, [0, 1, 2, 3])
    assert all(torch.equal(optimizer.state[matrix][name], kept[name]) for name in kept)
    assert not move_state_rows(optimizer, matrix, [None] * 4)
    assert matrix not in optimizer.state


def test_state_without_rows_begins_anew() -> None:
    matrix = nn.Parameter(numbers(4, 3))
    optimizer = torch.optim.SGD([matrix], lr=1e-2, momentum=0.9)
    optimizer.state[matrix] = {"momentum_buffer": torch.ones(4, 3), "basis": torch.ones(3, 2)}
    assert not move_state_rows(optimizer, matrix, [0, 1, 2, None])
    assert matrix not in optimizer.state


@pytest.mark.parametrize("wrong", [[0, 1], [0, 1, 2, 4], [0, 0, 1, 2], [-1, 0, 1, 2]])
def test_sources_that_do_not_fit_are_refused(wrong: list[int]) -> None:
    matrix = nn.Parameter(numbers(4, 3))
    with pytest.raises(InputError, match="of 4 rows which one it was"):
        move_state_rows(AdamW([matrix]), matrix, wrong)
