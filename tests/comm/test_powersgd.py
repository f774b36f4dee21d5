"""PowerSGD: PyTorch's hook to rounding, many buckets as one, nothing owed of a skipped update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

from modicum.comm import PowerSGD
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.ranks import Ranks

ranked = pytest.mark.ranks


def by_their_hook(ranks: Ranks, updates: int) -> list[Gradients]:
    """Averages by PyTorch's PowerSGD on one bucket, its first Q ours."""
    model = nn.parallel.DistributedDataParallel(Fixed().double(), bucket_cap_mb=100)
    state = theirs.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, theirs.powerSGD_hook)
    ours = PowerSGD(rank=4).bind(ExchangeContext(ranks, seed=3))
    found = []
    for update in range(updates):
        gradients = {n: gradient(n, update, ranks.rank).double() for n in SHAPES}
        model(gradients).backward()
        sums = {name: p.grad.clone() for name, p in model.module.named.items()}
        found.append(sums)
        model.zero_grad()
        if update == 1:
            _give(state, model, ours)
    return found


def _give(state: Any, model: nn.Module, ours: Any) -> None:
    """Have their hook begin at our first factors, in the order in which it takes matrices."""
    names = list(reversed(SHAPES))
    sides = {name: (SHAPES[name][0], math.prod(SHAPES[name][1:])) for name in names}
    low = [name for name in names if ours.method.rank_of(SHAPES[name])]
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name in low:
        by_shape.setdefault(sides[name], []).append(name)
    order = [name for group in by_shape.values() for name in group]
    pairs = [ours.factors(name, torch.empty(sides[name]).double()) for name in order]
    state.p_memory_dict[0] = torch.cat([p.flatten() for p, _ in pairs])
    state.q_memory_dict[0] = torch.cat([q.flatten() for _, q in pairs])


def by_ours(ranks: Ranks, updates: int, buckets: int) -> list[Gradients]:
    return converged(PowerSGD(rank=4, start_after=2), ranks, updates, buckets=buckets)


@ranked
def test_sums_are_those_of_pytorchs_hook(pool: Pool) -> None:
    """In fp64: which directions come next may hang on little, and rounding grows with updates."""
    ours, hook = pool.run(by_ours, 22, 1), pool.run(by_their_hook, 22)
    for mine, its in zip(ours[0], hook[0], strict=True):
        assert furthest(mine, its) < 1e-10
    assert all(torch.equal(ours[0][-1][name], ours[1][-1][name]) for name in SHAPES)


@ranked
def test_many_buckets_are_one(pool: Pool) -> None:
    one, many = pool.run(by_ours, 20, 1)[0], pool.run(by_ours, 20, 4)[0]
    for mine, other in zip(one, many, strict=True):
        assert furthest(mine, other) < 1e-12


def calls_and_debts(ranks: Ranks, updates: int) -> tuple[int, float]:
    exchange = PowerSGD(rank=4).bind(ExchangeContext(ranks))
    worst = 0.0
    for update in range(updates):
        own = {name: gradient(name, update, ranks.rank) for name in SHAPES}
        before = exchange.owed()
        sums = exchanged(exchange, own, 2)
        exchange.commit()
        worst = max(worst, debt_off(ranks, own, before, sums, exchange.owed()))
    return exchange.wire.meter.calls["all_reduce"], worst


@ranked
def test_two_calls_a_bucket_and_nothing_is_lost(pool: Pool) -> None:
    for calls, off in pool.run(calls_and_debts, 5):
        assert calls == 2 * 2 * 5
        assert off < 1e-6


def test_what_travels_as_it_is() -> None:
    value = PowerSGD(rank=4)
    assert value.dense(SHAPES) == ["bias", "small"]
    assert PowerSGD(rank=4, least_saving=0).dense(SHAPES) == ["bias"]
    assert PowerSGD(rank=4, least_saving=3).rank_of((24, 40)) == 4  # 960 numbers in 256
    assert PowerSGD(rank=4, least_saving=4).rank_of((24, 40)) == 0
