"""Plain exchanges: sums to owners, weights to all, and what they put on the wire."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from pool import Pool

from modicum.comm import SDP4Bit
from modicum.core.codecs.elements import Stream
from modicum.core.errors import InputError
from modicum.core.ranks.exchange import (
    LOCAL,
    NODE,
    SHARD,
    ExchangeContext,
    ExchangeQuery,
    Nodes,
    ShardExchange,
)
from modicum.core.ranks.ranks import Ranks

WIDTHS = (5, 33)


def exchanged(ranks: Ranks, dtype: torch.dtype) -> Any:
    exchange = ShardExchange(ExchangeContext(ranks))
    sums, copies = [], []
    for width in WIDTHS:
        rows = torch.arange(ranks.size * width).float().view(ranks.size, width) + 10 * ranks.rank
        sums.append(exchange.reduce_scatter(rows, "rows"))
        copy = torch.full((ranks.size, width), -1.0, dtype=dtype)
        shard = torch.arange(width) / 3 + ranks.rank
        copies.append(exchange.refresh(copy, shard, "rows"))
    return [one() for one in sums], [one() for one in copies], exchange.sent()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_come_to_their_owners_and_weights_to_all(
    pool: Pool, ranks: int, dtype: torch.dtype
) -> None:
    results = pool.run(exchanged, dtype, ranks=ranks)
    site = ExchangeQuery(WIDTHS, ranks, ranks, copy_bytes=dtype.itemsize)
    ledger = Counter[tuple[str, str]]()
    for wire in ShardExchange.ledger(site).wire:
        ledger[wire.collective, wire.axis] += wire.bytes
    for rank, (sums, copies, sent) in enumerate(results):
        for width, total, copy in zip(WIDTHS, sums, copies, strict=True):
            own = torch.arange(ranks * width).float().view(ranks, width)[rank]
            assert torch.equal(total, ranks * own + 10 * sum(range(ranks)))
            expected = torch.stack([torch.arange(width) / 3 + r for r in range(ranks)])
            assert torch.equal(copy, expected.to(dtype))
        assert sent == ledger
    # All of it counted by hand: fp32 sums, copies in their own dtype.
    assert sum(ledger.values()) == (ranks - 1) * sum(WIDTHS) * (4 + dtype.itemsize)


def axes(ranks: Ranks, local: int) -> Any:
    context = ExchangeContext(Ranks(ranks.rank, ranks.size, ranks.rank % local, local))
    exchange = ShardExchange(context)
    found = {}
    for axis in exchange.nodes.hops():
        wire = exchange.wire(axis)
        found[axis] = wire.all_gather(torch.tensor([ranks.rank])).wait().tolist()
    return found


@pytest.mark.ranks
def test_ranks_of_a_host_and_their_likes_on_others(pool: Pool) -> None:
    results = pool.run(axes, 2, ranks=4)
    assert [found[LOCAL] for found in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [found[NODE] for found in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_hosts_have_equally_many() -> None:
    assert Nodes.of(4, 8) == Nodes(1, 4)
    assert Nodes().hops() == ()
    with pytest.raises(InputError, match="hosts of equally many") as refusal:
        Nodes.of(6, 4)
    assert (refusal.value.field, refusal.value.allowed) == ("comm.ranks_per_node", "1, 2, 3, 6")


def test_draws_differ_by_update_rank_and_buffer_and_go_on_after_a_resume() -> None:
    def stream(rank: int, updates: int, name: str) -> Stream:
        exchange = ShardExchange(ExchangeContext(Ranks(rank, 2), seed=7))
        for _ in range(updates):
            exchange.advance()
        return exchange.stream(name)

    streams = {
        stream(rank, updates, name) for rank in (0, 1) for updates in (0, 1) for name in "ab"
    }
    assert len(streams) == 8
    resumed = ShardExchange(ExchangeContext(Ranks(1, 2), seed=7))
    resumed.load_state_dict({"step": 1})
    assert resumed.stream("a") == stream(1, 1, "a")
    assert resumed.state_dict() == {"step": 1}


def hosts_differ(ranks: Ranks) -> str:
    """What is said where rank 0 knows one host of four, and the others two of two."""
    local = 4 if ranks.first else 2
    exchange = SDP4Bit().bind(ExchangeContext(Ranks(ranks.rank, ranks.size, ranks.rank, local)))
    with pytest.raises(InputError) as refusal:
        exchange.wire(SHARD)
    return str(refusal.value)


@pytest.mark.ranks
def test_ranks_that_know_other_hosts_are_told_so_where_hosts_count(pool: Pool) -> None:
    for said in pool.run(hosts_differ, ranks=4):
        assert "nodes is [1, 4] there and [2, 2] here" in said


def test_hosts_of_unequal_numbers_matter_only_to_who_asks_for_them() -> None:
    exchange = ShardExchange(ExchangeContext(Ranks(0, 3, 0, 2)))
    with pytest.raises(InputError, match="hosts of equally many"):
        _ = exchange.nodes
