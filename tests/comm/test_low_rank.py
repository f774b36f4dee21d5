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


@pytest.mark.parametrize("kind", [ACPSGD, PowerSGD], ids=lambda kind: kind.info.name)
def test_what_would_not_shrink_travels_as_it_is(kind: type[LowRankMethod]) -> None:
    """A LoRA's factors of no larger rank, above all: at full rank two factors are larger."""
    shapes = {"A": (2, 64), "B": (64, 2), "other A": (4, 4096), "square": (8, 8), "large": (64, 64)}
    value = kind(rank=4)
    assert value.dense(shapes) == ["A", "B", "other A", "square"]
    assert kind(rank=4, least_saving=0.0).dense(shapes) == []  # who asks for all gets all
    (wire,) = value.ledger(MatrixQuery((((2, 64), (64, 2)),), ranks=2)).wire
    assert (wire.bytes, wire.count) == (4 * (2 * 128 + 2), 1)
    assert value.ledger(MatrixQuery((((2, 64), (64, 2)),), ranks=2)).bytes("buffer") == 0
