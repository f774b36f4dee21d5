"""Over which ranks a tensor is sharded: a dimension of one rank shards nothing."""

from __future__ import annotations

import pytest
import torch
from pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from modicum.core.contracts.weight_terms import row_squares
from modicum.core.ranks.ranks import Ranks


def squares(ranks: Ranks, sizes: tuple[int, int]) -> list[float] | str:
    """Of a matrix whose rows are sharded over both dimensions of a mesh; or why there are none."""
    mesh = init_device_mesh("cpu", sizes)
    weight = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Shard(0)])
    try:
        found: list[float] = row_squares({"weight": weight}, ranks)["weight"].tolist()
    except ValueError as error:
        return str(error)
    return found


@pytest.mark.ranks
def test_rows_are_summed_over_the_dimension_that_shards_them(pool: Pool) -> None:
    for sizes in ((2, 1), (1, 2)):
        assert pool.run(squares, sizes) == [[4.0] * 4] * 2
    for said in pool.run(squares, (2, 2), ranks=4):
        assert "sharded over several dimensions of a mesh" in said
