"""ACP-SGD: exact where rank allows it, its equations, one call a bucket, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from low_rank_loops import (
    SHAPES,
    Fixed,
    Gradients,
    converged,
    debt_off,
    exchanged,
    furthest,
    gradient,
)
from pool import Pool
from torch import Tensor, nn

from modicum.comm import ACPSGD, PowerSGD
from modicum.comm.debts import regrouping
from modicum.comm.low_rank_exchange import LowRankExchange
from modicum.core.ranks.ddp_hook import DDPHook
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.ranks import Ranks

ranked = pytest.mark.ranks


def bound(ranks: Ranks, **fields: Any) -> LowRankExchange:
    return ACPSGD(**fields).bind(ExchangeContext(ranks, seed=3))


def drawn(shape: tuple[int, ...], update: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * update + rank)
    return torch.randn(shape, generator=generator)


def off_by(ranks: Ranks, shape: tuple[int, int], rank: int) -> list[tuple[float, float]]:
    """By update, how far the sum is from the dense one of gradients and debts, and the debt."""
    exchange, found = bound(ranks, rank=rank, least_saving=0.0), []
    for update in range(6):
        own = drawn(shape, update, ranks.rank)
        dense = own + exchange.owed().get("M", torch.zeros(shape))
        torch.distributed.all_reduce(dense)
        total = exchanged(exchange, {"M": own})["M"]
        exchange.commit()
        off = float((total - dense).norm() / dense.norm())
        found.append((off, float(exchange.owed()["M"].norm() / own.norm())))
    return found


@ranked
def test_a_square_matrix_at_full_rank_is_exact(pool: Pool) -> None:
    for off, debt in pool.run(off_by, (12, 12), 12)[1]:
        assert off < 1e-5
        assert debt < 1e-5


@ranked
@pytest.mark.parametrize(("shape", "exact"), [((8, 20), 1), ((20, 8), 0)], ids=str)
def test_at_the_smaller_width_every_second_update_is_exact(
    pool: Pool, shape: tuple[int, int], exact: int
) -> None:
    found = pool.run(off_by, shape, 8)[0]
    for update, (off, debt) in enumerate(found):
        if update % 2 == exact:
            assert off < 1e-5
            assert debt < 1e-5
        else:
            assert off > 0.1
            assert debt > 0.1


def traced(ranks: Ranks, updates: int, buckets: int) -> dict[str, Any]:
    exchange = bound(ranks, rank=4, least_saving=0.0)
    worst, sums = 0.0, dict[str, Tensor]()
    for update in range(updates):
        own = {name: gradient(name, update, ranks.rank) for name in SHAPES}
        before = exchange.owed()
        sums = exchanged(exchange, own, buckets)
        exchange.commit()
        worst = max(worst, debt_off(ranks, own, before, sums, exchange.owed()))
    return {
        "lost": worst,
        "sums": sums,
        "factors": exchange.state_dict(),
        "calls": exchange.wire.meter.calls["all_reduce"],
    }


@ranked
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_and_nothing_is_lost_in_one_call_a_bucket(pool: Pool, ranks: int) -> None:
    fused, apart = pool.run(traced, 7, 1, ranks=ranks), pool.run(traced, 7, 5, ranks=ranks)
    for found in (*fused, *apart):
        assert found["lost"] < 1e-6
        for name, value in found["sums"].items():
            torch.testing.assert_close(value, fused[0]["sums"][name], rtol=1e-4, atol=1e-4)
    for arm, calls in ((fused, 7), (apart, 35)):
        assert {found["calls"] for found in arm} == {calls}
        first = arm[0]["factors"]
        assert len(first) == 1 + 2 * 4  # all but the vector
        for found in arm:
            assert all(torch.equal(found["sums"][n], arm[0]["sums"][n]) for n in SHAPES)
            for name, value in found["factors"].items():
                same = torch.equal(value, first[name]) if name != "step" else value == 7
                assert same, name
    if ranks == 2:  # two numbers have one sum
        assert furthest(fused[0]["sums"], apart[0]["sums"]) == 0


def written_out(ranks: int, updates: int, first: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The authors' step, for all ranks at once and in fp64; means, as theirs are."""
    shape = SHAPES["first"]
    p, q = (each.double() for each in first)
    errors = [torch.zeros(shape, dtype=torch.float64) for _ in range(ranks)]
    found = []
    for update in range(updates):
        matrices = [gradient("first", update, r).double() + errors[r] for r in range(ranks)]
        if update % 2 == 0:
            q = torch.linalg.qr(q)[0]
            locals_ = [matrix @ q for matrix in matrices]
            errors = [m - own @ q.T for m, own in zip(matrices, locals_, strict=True)]
            p = torch.stack(locals_).mean(0)
        else:
            p = torch.linalg.qr(p)[0]
            locals_ = [matrix.T @ p for matrix in matrices]
            errors = [m - p @ own.T for m, own in zip(matrices, locals_, strict=True)]
            q = torch.stack(locals_).mean(0)
        found.append(p @ q.T)
    return found


def by_ours(ranks: Ranks, updates: int) -> tuple[tuple[Tensor, Tensor], list[Gradients]]:
    first = bound(ranks, rank=4).factors("first", torch.empty(SHAPES["first"]).double())
    return first, converged(ACPSGD(rank=4), ranks, updates)


@ranked
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_those_of_the_authors_equations(pool: Pool, ranks: int) -> None:
    first, ours = pool.run(by_ours, 20, ranks=ranks)[0]
    for mine, wanted in zip(ours, written_out(ranks, 20, first), strict=True):
        assert float((mine["first"] - wanted).norm() / wanted.norm()) < 1e-10


def of_one_matrix(ranks: Ranks, updates: int, feedback: bool) -> list[float]:
    """Of the same gradient each time: how far the mean sum, or the last one, is from it."""
    exchange = bound(ranks, rank=4, error_feedback=feedback)
    matrix = drawn((24, 40), 0, 0) / ranks.size
    total, found = torch.zeros(24, 40), []
    for update in range(updates):
        last = exchanged(exchange, {"M": matrix})["M"]
        exchange.commit()
        total += last
        shown = total / (update + 1) if feedback else last
        found.append(float((shown / ranks.size - matrix).norm() / matrix.norm()))
    return found


@ranked
def test_a_matrix_that_stays_is_found(pool: Pool) -> None:
    """Without feedback the best of its rank; with it all, as 1 / t."""
    values = torch.linalg.svdvals(drawn((24, 40), 0, 0))
    best = float(values[4:].norm() / values.norm())
    without = pool.run(of_one_matrix, 120, False)[0]
    assert without[0] > best + 0.05
    assert without[-1] == pytest.approx(best, rel=1e-2)
    with_it = pool.run(of_one_matrix, 120, True)[0]
    assert with_it[-1] < 0.5 * best
    assert with_it[119] / with_it[59] == pytest.approx(0.5, abs=0.1)


def skipped(ranks: Ranks, commit: bool) -> bool:
    """Whether an update with a NaN on one rank leaves all as it was, and its sum shows it.

    Also where nobody looks at the sums, and it is committed.
    """
    exchange = bound(ranks, rank=4)
    for update in range(3):
        exchanged(exchange, {n: gradient(n, update, ranks.rank) for n in SHAPES})
        exchange.commit()
    before = {**exchange.state_dict(), **{f"E {n}": e for n, e in exchange.owed().items()}}
    before = {n: v.clone() if isinstance(v, Tensor) else v for n, v in before.items()}
    own = {n: gradient(n, 3, ranks.rank) for n in SHAPES}
    if ranks.rank == 1:
        own["first"][3, 5] = torch.nan
    sums = exchanged(exchange, own)
    (exchange.commit if commit else exchange.discard)()
    after = {**exchange.state_dict(), **{f"E {n}": e for n, e in exchange.owed().items()}}
    same = all(
        torch.equal(v, after[n]) if isinstance(v, Tensor) else v == after[n]
        for n, v in before.items()
    )
    return same and before.keys() == after.keys() and not sums["first"].isfinite().all()


@ranked
@pytest.mark.parametrize("commit", [False, True])
def test_a_skipped_update_leaves_all_as_it_was(pool: Pool, commit: bool) -> None:
    assert pool.run(skipped, commit) == [True, True]


def unused(ranks: Ranks) -> tuple[Any, ...]:
    """A gradient that rank 0 alone has, and one that nobody has, then both."""
    exchange, found = bound(ranks, rank=2), []
    zeros = torch.zeros(()).expand(12, 10)
    for update in range(3):
        own = {n: drawn((12, 10), update, ranks.rank) for n in ("one", "none")}
        used = {"one", "none"} if update == 2 else {"one"} if ranks.first else set()
        sums = exchange.begin({n: own[n] if n in used else zeros for n in own}, used).land()
        found.append({n: None if s is None else s.full() for n, s in sums.items()})
        exchange.commit()
    return found, sorted(exchange.owed())


@ranked
def test_gradients_that_not_all_ranks_have(pool: Pool) -> None:
    for found, owed in pool.run(unused):
        assert [update["none"] is None for update in found] == [True, True, False]
        assert all(update["one"].isfinite().all() for update in found)
        assert owed == ["none", "one"]


def every_second(ranks: Ranks) -> tuple[list[float], bool]:
    """Of a matrix that every second update uses, how far its sums are from those that are dense.

    And whether an exchange that took up the state of another gives the next sum to the bit.
    """
    exchange, shape = bound(ranks, rank=8, least_saving=0.0), (8, 20)
    found, taken = [], exchange
    zeros = torch.zeros(()).expand(shape)
    for update in range(7):
        used = {"M"} if update % 2 == 0 else set[str]()
        own = drawn(shape, update, ranks.rank)
        dense = own + exchange.owed().get("M", torch.zeros(shape))
        if update == 6:  # when its factors take turns the other way round
            taken = bound(ranks, rank=8, least_saving=0.0)
            taken.load_state_dict(exchange.state_dict())
            taken.owe(exchange.owed())
        total = exchange.begin({"M": own if used else zeros}, used).land()["M"]
        again = None
        if taken is not exchange:
            again = taken.begin({"M": own}, used).land()["M"]
        exchange.commit()
        if used:
            torch.distributed.all_reduce(dense)
            assert total is not None
            found.append(float((total.full() - dense).norm() / dense.norm()))
    assert total is not None
    assert again is not None
    return found, torch.equal(total.full(), again.full())


@ranked
def test_factors_take_turns_by_the_updates_that_use_a_matrix(pool: Pool) -> None:
    for found, resumed in pool.run(every_second):
        assert all((off < 1e-5) is (number % 2 == 1) for number, off in enumerate(found))
        assert resumed


def dead(ranks: Ranks) -> list[bool]:
    """Gradients that are zero: sums stay finite, and those that follow are as they should be."""
    exchange, finite = bound(ranks, rank=2), []
    for update in range(6):
        own = drawn((12, 10), update, ranks.rank) * (update > 2)
        finite.append(bool(exchanged(exchange, {"M": own})["M"].isfinite().all()))
        exchange.commit()
    return finite


@ranked
def test_zero_gradients_stay_finite(pool: Pool) -> None:
    assert pool.run(dead)[0] == [True] * 6


def test_debts_of_other_numbers_of_ranks_keep_their_sum() -> None:
    old = [{"M": drawn((12, 10), 0, rank)} for rank in range(2)]
    four = [regrouping(4, {})(old) for _ in range(4)]
    two = [regrouping(2, {})(four) for _ in range(2)]
    wanted = old[0]["M"].double() + old[1]["M"].double()
    for states in (four, two):
        total = torch.stack([state["M"].double() for state in states]).sum(0)
        assert float((total - wanted).norm() / wanted.norm()) < 1e-6


def test_alone_nothing_is_compressed() -> None:
    exchange, own = bound(Ranks(), rank=1), {n: gradient(n, 0, 0) for n in SHAPES}
    sums = exchanged(exchange, own)
    assert all(torch.equal(sums[name], own[name]) for name in SHAPES)
    assert exchange.wire.meter.bytes["all_reduce"] == 0


def hooked(ranks: Ranks, method: str, bucket_mb: float) -> tuple[list[Gradients], int]:
    """Means by DDP's hook, the fourth update spoilt on one rank, and how many updates counted."""
    model = nn.parallel.DistributedDataParallel(Fixed().double(), bucket_cap_mb=bucket_mb)
    value = {"acp_sgd": ACPSGD(rank=4), "powersgd": PowerSGD(rank=4)}[method]
    hook = DDPHook(value.bind(ExchangeContext(ranks, seed=3)), model)
    found = []
    for update in (0, 1, 2, 99, 3, 4):
        own = {n: gradient(n, update, ranks.rank).double() for n in SHAPES}
        if update == 99 and ranks.rank == 1:
            own["second"][0, 0] = torch.nan
        model(own).backward()
        sums = {n.split(".")[-1]: p.grad.clone() for n, p in model.module.named_parameters()}
        if update == 99:
            assert not sums["second"].isfinite().all()
        else:
            found.append(sums)
        model.zero_grad()
    hook.settle()
    return found, hook.exchange.step


def unhooked(ranks: Ranks, method: str) -> list[Gradients]:
    value = {"acp_sgd": ACPSGD(rank=4), "powersgd": PowerSGD(rank=4)}[method]
    return converged(value, ranks, 5, prefix="named.")


@ranked
@pytest.mark.parametrize("bucket_mb", [1e-3, 100.0])
@pytest.mark.parametrize("method", ["acp_sgd", "powersgd"])
def test_as_a_hook_of_ddp_on_any_buckets(pool: Pool, method: str, bucket_mb: float) -> None:
    wanted = pool.run(unhooked, method)[0]
    for found, counted in pool.run(hooked, method, bucket_mb):
        assert counted == 5
        for mine, its in zip(found, wanted, strict=True):
            assert furthest(mine, its) < 1e-10
