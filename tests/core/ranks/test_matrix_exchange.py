"""Sums of a bucket keep their buffers no longer than who has asked for them does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from low_rank_loops import among_idle, exchanged
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from modicum.comm import ACPSGD, DenseSums, PowerSGD
from modicum.comm.base import MatrixMethod
from modicum.core.errors import InputError
from modicum.core.ranks import matrix_exchange, pending_sums
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.pending_sums import Parts
from modicum.core.ranks.ranks import Ranks

METHODS: dict[str, MatrixMethod] = {"acp_sgd": ACPSGD(rank=2), "powersgd": PowerSGD(rank=2)}
GRADIENTS = {"weight": torch.ones(12, 10), "bias": torch.ones(12)}


class Rounding(MatrixExchange):
    """Sends 16 bits, so that sums lie elsewhere than the message."""

    message_dtype = torch.bfloat16


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """The memory of every message that is made, and of the sums that come of it."""
    made: list[StorageWeakRef] = []

    class Noting(Parts):
        def joined(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
            made.append(StorageWeakRef((flat := super().joined(tensors, dtype)).untyped_storage()))
            return flat

        def split(self, flat: Tensor) -> list[Tensor]:
            made.append(StorageWeakRef(flat.untyped_storage()))
            return super().split(flat)

    for module in (matrix_exchange, pending_sums):
        monkeypatch.setattr(module, "Parts", Noting)
    return made


@pytest.mark.parametrize("kind", [MatrixExchange, Rounding])
def test_sums_that_have_landed_live_as_long_as_who_asked_for_them(
    kind: type[MatrixExchange], buffers: list[StorageWeakRef]
) -> None:
    exchange = kind()
    pending = exchange.begin(GRADIENTS, GRADIENTS)
    sums = pending.land()
    assert all(total is not None for total in sums.values())
    assert not all(buffer.expired() for buffer in buffers)
    del sums
    assert buffers
    assert all(buffer.expired() for buffer in buffers)
    assert exchange._begun == [pending]  # though the update is not made yet


def test_a_message_is_gone_when_its_sum_is_there(buffers: list[StorageWeakRef]) -> None:
    pending = Rounding().begin(GRADIENTS, GRADIENTS)
    message = buffers[-1]
    assert not message.expired()
    pending.turn()
    assert message.expired()
    assert not buffers[-1].expired()
    weight = pending.land()["weight"]
    assert weight is not None
    assert torch.equal(weight.full(), GRADIENTS["weight"])


@pytest.mark.parametrize("method", METHODS)
def test_of_low_rank_sums_factors_alone_stay(method: str, buffers: list[StorageWeakRef]) -> None:
    """A bucket's second call has nothing else, so what it has summed is state as it is."""
    exchange = METHODS[method].bind(ExchangeContext(Ranks(0, 2)))
    among_idle(exchange)
    exchanged(exchange, GRADIENTS)
    living = {buffer.cdata for buffer in buffers if not buffer.expired()}
    assert len(living) == (1 if exchange.sums_twice else 0)
    exchange.forget("weight")
    assert all(buffer.expired() for buffer in buffers)


@pytest.mark.parametrize("method", [*METHODS.values(), DenseSums(dtype="bf16")])
def test_of_complex_gradients_no_imaginary_part_is_lost(method: MatrixMethod) -> None:
    own = {"bias": torch.ones(12), "weight": torch.full((12, 10), 1 + 2j)}
    exchange = method.bind(ExchangeContext(Ranks(0, 2)))
    with pytest.raises(InputError, match=r"weight: complex parameters .*view_as_real"):
        exchange.begin(own, own)  # before anything is sent
    for taken in (method.bind(ExchangeContext()), DenseSums().bind(exchange.context)):
        taken.check(own.items())  # one rank alone sends nothing; and 32 bits are as they are
    total = MatrixExchange().begin(own, own).land()["weight"]
    assert total is not None
    assert torch.equal(total.full(), own["weight"])
