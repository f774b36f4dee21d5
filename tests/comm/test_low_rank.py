"""Low-rank methods: what travels as factors, and what an update takes."""

from __future__ import annotations

import pytest

from modicum.comm import ACPSGD, PowerSGD
from modicum.comm.low_rank import LowRankMethod
from modicum.core.ranks.matrix_exchange import MatrixQuery


@pytest.mark.parametrize("method", [ACPSGD(rank=2), PowerSGD(rank=2)], ids=lambda m: m.info.name)
def test_a_scalar_travels_as_it_is_and_is_counted(method: LowRankMethod) -> None:
    assert method.dense({"matrix": (12, 10), "scale": ()}) == ["scale"]
    without, with_scalar = (
        method.ledger(MatrixQuery(((*shapes, (12, 10)),), ranks=2)) for shapes in ((), ((),))
    )
    # Its one number and its flag, of each rank of two; nothing is owed of it.
    assert with_scalar.wire[0].bytes - without.wire[0].bytes == 8
    assert with_scalar.bytes("buffer") == without.bytes("buffer") > 0
