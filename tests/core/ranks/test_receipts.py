"""Checksums of messages: what they see, what they do not take for damage, and what a run does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool

from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.receipts import DamagedMessage, Receipts, checksum

ranked = pytest.mark.ranks


@given(st.binary(min_size=1, max_size=100), st.data())
def test_another_byte_is_another_checksum(content: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= data.draw(st.integers(1, 255))
    one, other = (torch.frombuffer(bytearray(c), dtype=torch.uint8) for c in (content, changed))
    assert checksum(one) == checksum(one.clone()) != checksum(other)


@pytest.mark.parametrize("elements", [0, 1, 7, 4096, 3 * 4096 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_any_part_of_a_buffer_has_one(elements: int, dtype: torch.dtype) -> None:
    whole = torch.arange(elements + 3).to(dtype)
    part = whole[3:]
    assert checksum(part) == checksum(part.clone())
    other = part.clone()
    other[-1:] = 1
    assert not elements or checksum(part) != checksum(other)


def test_stretches_that_change_places_are_seen() -> None:
    values = torch.randn(4 * 8192)
    first, second, *rest = values.split(8192)
    assert checksum(torch.cat([second, first, *rest])) != checksum(values)


def calls(engine: Collectives, size: int) -> list[Any]:
    """One of each kind, of sizes that no number of words divides."""
    handles = [
        engine.reduce_scatter(torch.randn(7 * size)),
        engine.all_gather(torch.randn(5)),
        engine.all_to_all(torch.arange(3 * size, dtype=torch.uint8)),
        engine.all_reduce(torch.randn(11)),
        engine.all_or(torch.arange(4)),
    ]
    return [handle.wait() for handle in handles]


def checked(ranks: Ranks) -> Receipts:
    ranks.receipts.begin(True)
    return ranks.receipts


def undamaged(ranks: Ranks) -> bool:
    receipts = checked(ranks)
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    whole, part = Collectives(ranks), Collectives(ranks, group=half[ranks.rank // 2])
    for _ in range(3):
        calls(whole, 4)
        calls(part, 2)
        receipts.take(ranks.sum(*receipts.mine()))
    # One call is under way while ranks agree, on one rank longer than on the others.
    under_way = whole.all_gather(torch.randn(50_000))
    for turn in range(2):
        if turn == ranks.rank:
            under_way.wait()
        receipts.take(ranks.sum(*receipts.mine()))
    under_way.wait()
    receipts.settle(ranks.sum)
    ranks.receipts.begin(False)
    return receipts.mine() == []


@ranked
def test_what_is_not_damaged_is_not_taken_for_it(pool: Pool) -> None:
    assert pool.run(undamaged, ranks=4) == [True] * 4


def damaged(ranks: Ranks, call: str, place: int) -> str:
    """What a rank says when rank 1 sends, or makes of what came, something else."""
    receipts, engine = checked(ranks), Collectives(ranks)
    right = getattr(dist, call)

    def wrong(output: Any, *given: Any, **options: Any) -> Any:
        if call == "all_reduce":
            work = right(output, *given, **options)
            work.wait()
            output[place] += 1
            return work
        sent, *rest = given
        other = sent.clone()
        other[place] ^= 1
        return right(output, other, *rest, **options)

    with mock.patch.object(dist, call, wrong if ranks.rank == 1 else right):
        calls(engine, ranks.size)
    try:
        receipts.settle(ranks.sum)
    except DamagedMessage as error:
        return str(error)
    finally:
        receipts.begin(False)
    return "nothing"


@ranked
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("all_to_all_single", "rank 1 sent other bytes than came"),
        ("all_reduce", "rank 1 made other sums than ranks 0, 2"),
    ],
)
def test_who_sent_what_was_damaged_is_named(pool: Pool, call: str, said: str) -> None:
    for found in pool.run(damaged, call, 0, ranks=3):
        assert found.startswith(said)
