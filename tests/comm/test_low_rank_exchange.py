"""Low-rank exchanges: what is owed is paid once, whatever the method's fields have become."""

from __future__ import annotations

import math

import pytest
import torch
from low_rank_loops import among_idle, exchanged
from torch import Tensor

from modicum.comm import ACPSGD, PowerSGD
from modicum.comm.low_rank import LowRankMethod
from modicum.comm.low_rank_exchange import LowRankExchange
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.ranks import Ranks

METHODS = {"acp_sgd": ACPSGD, "powersgd": PowerSGD}
# Ways in which a gradient of shape (4, 2, 3) travels as it is though it was compressed before.
DENSE: dict[str, LowRankMethod] = {
    "of no smaller rank": PowerSGD(rank=4),
    "not for so little": ACPSGD(rank=1, least_saving=100.0),
    "not yet": ACPSGD(rank=1, start_after=3),
}


def bound(method: LowRankMethod) -> LowRankExchange:
    """Rank 0 of two, of which the other has gradients of zeros."""
    found = method.bind(ExchangeContext(Ranks(0, 2), seed=3))
    assert isinstance(found, LowRankExchange)
    among_idle(found)
    return found


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", METHODS)
def test_without_feedback_errors_that_were_taken_up_are_paid_once(kind: str) -> None:
    # At full rank sums are exact, in every update of a square matrix.
    exchange = bound(METHODS[kind](rank=5, least_saving=0.0, error_feedback=False))
    owed, own = drawn(5, 5), drawn(5, 5, seed=1)
    exchange.owe({"M": owed})
    for paid in (owed, torch.zeros_like(owed)):
        total = exchanged(exchange, {"M": own})["M"]
        torch.testing.assert_close(total, own + paid, rtol=1e-4, atol=1e-5)
        exchange.commit()
        assert exchange.owed() == {}


@pytest.mark.parametrize("kind", METHODS)
def test_factors_are_taken_up_and_at_another_rank_as_many_columns_as_it_has(kind: str) -> None:
    own, before = drawn(12, 10), bound(METHODS[kind](rank=3))
    exchanged(before, {"M": own})
    before.commit()
    for rank in (2, 3, 4):
        exchange, new = (bound(METHODS[kind](rank=rank)) for _ in range(2))
        exchange.load_state_dict(before.state_dict())
        assert exchange.step == 1
        every = zip(*(one.factors("M", own) for one in (before, new, exchange)), strict=True)
        for old, fresh, found in every:
            assert torch.equal(found[:, :3], old[:, :rank])
            assert torch.equal(found[:, 3:], fresh[:, 3:])
        exchanged(exchange, {"M": own})
        exchange.commit()
        p, q = (exchange.state_dict()[f"M/{side}"] for side in "PQ")
        assert (p.shape, q.shape) == ((12, rank), (10, rank))


@pytest.mark.parametrize("kind", METHODS)
def test_a_rank_rises_by_the_run_s_step_and_errors_are_paid_all_the_same(kind: str) -> None:
    method = METHODS[kind](rank=[1, 4, 3], start_after=1, least_saving=0.0)
    assert method.rank_of((12, 10)) == 4  # what is planned for
    exchange, left, ranks = bound(method), torch.zeros(12, 10), list[int]()
    for step in range(7):
        own = drawn(12, 10, seed=step)
        sent = exchanged(exchange, {"M": own})["M"]
        assert sent is not None
        left += own - sent
        exchange.commit()
        known = exchange.state_dict().get("M/P")
        ranks.append(0 if known is None else known.shape[1])
    assert ranks == [0, 1, 2, 3, 4, 4, 4]
    if kind == "acp_sgd":  # with PowerSGD the idle rank owes a part of it
        torch.testing.assert_close(exchange.owed()["M"], left, rtol=1e-3, atol=1e-4)
    resumed = bound(method)
    resumed.load_state_dict(exchange.state_dict())
    resumed.owe(exchange.owed())
    own = drawn(12, 10, seed=9)
    one, other = (exchanged(each, {"M": own})["M"] for each in (exchange, resumed))
    assert torch.equal(one, other)


def owing(way: str) -> tuple[LowRankExchange, Tensor, Tensor]:
    """An exchange that now sends a tensor as it is, what it owes of it, and that as a gradient."""
    exchange, owed = bound(DENSE[way]), drawn(4, 6)
    exchange.owe({"M": owed})
    return exchange, owed, owed.view(4, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", DENSE)
def test_what_is_owed_of_a_tensor_that_travels_as_it_is_is_paid_once(
    way: str, dtype: torch.dtype
) -> None:
    exchange, _, owed = owing(way)
    own = drawn(4, 2, 3, seed=1).to(dtype)
    before = own.clone()
    assert torch.equal(exchanged(exchange, {"M": own})["M"], own + owed)
    assert torch.equal(own, before)  # a gradient's memory is not the exchange's
    exchange.commit()
    assert exchange.owed() == {}
    assert torch.equal(exchanged(exchange, {"M": own})["M"], own.float())


@pytest.mark.parametrize("way", DENSE)
def test_of_an_update_that_is_passed_over_it_is_owed_still(way: str) -> None:
    exchange, kept, owed = owing(way)
    own = drawn(4, 2, 3, seed=1)
    for _ in range(2):
        assert torch.equal(exchanged(exchange, {"M": own})["M"], own + owed)
        exchange.discard()
        assert torch.equal(exchange.owed()["M"], kept)


@pytest.mark.parametrize("way", DENSE)
def test_where_no_rank_has_the_gradient_it_is_owed_still(way: str) -> None:
    exchange, kept, owed = owing(way)
    zeros, own = torch.zeros(()).expand(4, 2, 3), drawn(4, 2, 3, seed=1)
    assert exchange.begin({"M": zeros}, ()).land() == {"M": None}
    exchange.commit()
    assert torch.equal(exchange.owed()["M"], kept)
    assert torch.equal(exchanged(exchange, {"M": own})["M"], own + owed)
    exchange.commit()
    assert exchange.owed() == {}


def state_of(exchange: LowRankExchange) -> dict[str, Tensor]:
    """Copies of all that it remembers."""
    held = {**exchange.state_dict(), **exchange.owed()}
    return {name: torch.as_tensor(value).clone() for name, value in held.items()}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["M", "bias"])
@pytest.mark.parametrize("kind", METHODS)
def test_nothing_is_owed_of_sums_that_are_not_finite(kind: str, where: str, value: float) -> None:
    """Nobody looked at them: the update counts as passed over, and those after it as they are."""
    exchange, other = (bound(METHODS[kind](rank=2)) for _ in range(2))
    for update in range(3):
        own = {"M": drawn(12, 10, seed=update), "bias": drawn(12, seed=update)}
        for each in (exchange, other):
            exchanged(each, own)
            each.commit()
        before = state_of(exchange)
        own[where].view(-1)[1] = value
        exchanged(exchange, own, buckets=2)  # of which one is finite
        exchange.commit()
        after = state_of(exchange)
        assert before.keys() == after.keys() == state_of(other).keys()
        for name, kept in before.items():
            assert torch.equal(kept, after[name])
            assert torch.equal(kept, state_of(other)[name])


def test_factors_of_a_bucket_keep_nothing_else_of_it() -> None:
    """One factor an update travels with what goes as it is, and is kept without that."""
    exchange = bound(ACPSGD(rank=2))
    for update in range(2):
        own = {"M": drawn(12, 10, seed=update), "bias": drawn(500, seed=update)}
        exchanged(exchange, own)
        exchange.commit()
        for factor in exchange.held():
            assert factor.untyped_storage().nbytes() == factor.nbytes
