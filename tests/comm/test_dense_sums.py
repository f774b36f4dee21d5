"""Dense sums: replicas' own bits in fp32; in 16 bits what rounding by hand gives."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from low_rank_loops import SHAPES, gradient
from pool import Pool
from torch import Tensor, nn

from modicum.comm.dense_sums import DenseSums
from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.strategy import Strategy
from modicum.core.ranks.ddp_hook import DDPHook
from modicum.core.ranks.exchange import SHARD, ExchangeContext, ExchangeQuery
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange, MatrixQuery
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.parallel.exchange_ledger import summed_on_sharded
from modicum.parallel.ledger import GatheredGroups, Group
from modicum.parallel.ledger import sharded as cut_ledger
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.parallel.zero import Zero
from modicum.planner.choose import layouts
from modicum.recipe import Recipe

ranked = pytest.mark.ranks
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Skipping(nn.Module):
    """A tied weight, sizes that no number of ranks divides, and a layer that rank 0 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.sometimes = (
            nn.Linear(7, 11),
            nn.Linear(11, 7),
            nn.Linear(7, 5),
        )
        self.third = nn.Linear(7, 11)
        self.third.weight = self.first.weight

    def forward(self, x: Tensor, *, all_of_it: bool) -> Tensor:
        x = self.second(self.third(self.second(self.first(x).tanh())).tanh())
        return self.sometimes(x) if all_of_it else x


def trained(ranks: Ranks, kind: str, value: DenseSums | None, spoil: bool = False) -> Any:
    """Weights after five updates of two micro-batches, one of them spoilt where asked for."""
    context, strategy = ExchangeContext(ranks), Strategy()
    if kind == "zero":
        rows = None if value is None else value.bind_rows(context)
        strategy = Zero(ranks, exchange=rows, bucket_bytes=300)
    else:
        matrices = None if value is None else value.bind(context)
        strategy = Replicated(ranks, Layout.of(ranks.size), 300, matrices)
    model = Skipping()
    strategy.start(model)
    parameters = [parameter for _, parameter in strategy.trained(model)]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for step in range(5):
        for part in range(2):
            seed = 100 * step + 10 * part + ranks.rank
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))
            loss = model(x, all_of_it=ranks.first).square().sum() / (8 * ranks.size)
            bad = spoil and step == 2 and part == 1 and ranks.rank == 1
            strategy.before_backward(last=part == 1)
            (loss * (1e9 if bad else 1.0)).backward()
        strategy.after_backward()
        norm = whole(strategy.norm(parameters))
        if math.isfinite(float(norm)):
            strategy.update(optimizer)
        else:
            strategy.discard()
        optimizer.zero_grad(set_to_none=True)
    return {name: whole(p.detach()).clone() for name, p in strategy.trained(model)}


@ranked
@pytest.mark.parametrize("kind", ["ddp", "zero"])
def test_in_32_bits_weights_are_those_without_it_to_the_bit(pool: Pool, kind: str) -> None:
    plain = pool.run(trained, kind, None, ranks=3)
    for found, other in zip(pool.run(trained, kind, DenseSums(), ranks=3), plain, strict=True):
        assert all(torch.equal(found[name], other[name]) for name in other)


@ranked
@pytest.mark.parametrize("kind", ["ddp", "zero"])
@pytest.mark.parametrize("dtype", TYPES)
def test_in_16_bits_ranks_have_one_model_near_the_exact_one(
    pool: Pool, kind: str, dtype: Any
) -> None:
    value = DenseSums(dtype=dtype, scale=64.0 if dtype == "fp16" else 1.0)
    found, plain = pool.run(trained, kind, value, ranks=3), pool.run(trained, kind, None, ranks=3)
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)
    far = max(float((found[0][name] - plain[0][name]).abs().max()) for name in plain[0])
    assert 0 < far < 0.02  # AdamW moves a weight by at most about 0.01 an update


@ranked
def test_what_becomes_infinite_is_an_update_that_is_passed_over_on_all_ranks(pool: Pool) -> None:
    found = pool.run(trained, "ddp", DenseSums(dtype="fp16"), True)
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)
    assert all(bool(weight.isfinite().all()) for weight in found[0].values())


def sums_of(ranks: Ranks, value: DenseSums, rows: bool) -> tuple[dict[str, Tensor], int]:
    """Sums of fixed gradients, or this rank's rows of them, and the bytes that were sent."""
    own = {name: gradient(name, 0, ranks.rank) for name in SHAPES}
    if not rows:
        exchange = value.bind(ExchangeContext(ranks))
        landed = exchange.begin(own, set(own)).land()
        exchange.commit()
        found = {name: total.full().clone() for name, total in landed.items() if total is not None}
        return found, exchange.wire.meter.bytes["all_reduce"]
    bound = value.bind_rows(ExchangeContext(ranks))
    assert bound is not None
    flat = torch.cat([each.flatten() for each in own.values()])
    flat = flat[: len(flat) // ranks.size * ranks.size].view(ranks.size, -1)
    total = bound.reduce_scatter(flat.clone(), "bucket")()
    return {"row": total}, sum(bound.sent().values())


@ranked
@pytest.mark.parametrize("dtype", TYPES)
def test_two_ranks_sums_are_those_of_rounded_gradients(pool: Pool, dtype: Any) -> None:
    """Of two numbers rounded to 16 bits the library's sum is the exact one, rounded once."""
    kind, scale = TYPES[dtype], 32.0
    for found, sent in pool.run(sums_of, DenseSums(dtype=dtype, scale=scale), False):
        for name in SHAPES:
            rounded = [(gradient(name, 0, rank) * scale).to(kind).double() for rank in range(2)]
            wanted = sum(rounded).to(kind).float() / scale
            assert torch.equal(found[name], wanted), name
        assert sent == 2 * (sum(math.prod(s) for s in SHAPES.values()) + len(SHAPES))


@ranked
@pytest.mark.parametrize("ranks", [2, 4])
def test_owners_add_up_rounded_rows_in_fp32(pool: Pool, ranks: int) -> None:
    flats = []
    for rank in range(ranks):
        flat = torch.cat([gradient(name, 0, rank).flatten() for name in SHAPES])
        flats.append(flat[: len(flat) // ranks * ranks].view(ranks, -1).bfloat16().float())
    found = pool.run(sums_of, DenseSums(dtype="bf16"), True, ranks=ranks)
    for rank, (rows, sent) in enumerate(found):
        wanted = flats[0][rank].clone()
        for flat in flats[1:]:
            wanted += flat[rank]
        assert torch.equal(rows["row"], wanted)
        assert sent == 2 * (ranks - 1) * len(wanted)


def hooked(ranks: Ranks, value: DenseSums | None) -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(9, 4), bucket_cap_mb=1e-5)
    if value is not None:
        DDPHook(value.bind(ExchangeContext(ranks)), model)
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(ranks.rank))
    model(x).square().mean().backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@ranked
def test_as_a_hook_of_ddp_gradients_are_their_means(pool: Pool) -> None:
    for ours, narrow, theirs in zip(
        pool.run(hooked, DenseSums()), pool.run(hooked, DenseSums(dtype="bf16")),
        pool.run(hooked, None), strict=True,
    ):  # fmt: skip
        for one, rounded, other in zip(ours, narrow, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(rounded, other, rtol=2e-2, atol=1e-3)
            assert not torch.equal(rounded, other)


def test_alone_nothing_is_rounded_and_nothing_travels() -> None:
    value, own = DenseSums(dtype="bf16"), {"weight": torch.tensor([[0.1, 1 / 3]])}
    exchange = value.bind(ExchangeContext())
    total = exchange.begin(own, set(own)).land()["weight"]
    assert total is not None
    assert torch.equal(total.full(), own["weight"])
    assert sum(exchange.wire.meter.bytes.values()) == 0
    rows = value.bind_rows(ExchangeContext())
    assert rows is not None
    assert torch.equal(rows.reduce_scatter(own["weight"], "bucket")(), own["weight"][0])


def test_the_ledger_halves_the_bytes_of_gradients_and_not_those_of_weights() -> None:
    at = MatrixQuery((((24, 40), (24,)), ((7, 5),)), 4)
    wide, narrow = (DenseSums(dtype=dtype).ledger(at) for dtype in ("fp32", "bf16"))
    assert wide.wire == MatrixExchange.ledger(at).wire
    assert [2 * wire.bytes for wire in narrow.wire] == [wire.bytes for wire in wide.wire]
    assert narrow.peak() * 2 == wide.peak()
    rows = ExchangeQuery((100, 30), 4, 4, copy_bytes=4)
    wires = {w.collective: w for w in DenseSums(dtype="bf16").ledger_of_rows(rows).wire}
    assert wires["all_to_all"].bytes == 2 * 3 * 130
    assert wires["all_gather"].bytes == 4 * 3 * 130


def sharded(
    ranks: Ranks, value: DenseSums | None, updates: int = 3
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Weights after updates of two micro-batches on FSDP2, and what an update's sums sent."""
    rows = None if value is None else value.bind_rows(ExchangeContext(ranks))
    strategy = Sharded(ranks, Layout.of(ranks.size, ranks.size), True, rows)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7, bias=False), nn.Linear(7, 5)
    )
    model[2].weight.requires_grad_(False)  # of a block that trains nothing
    strategy.cut(model, [model[0], model[2]], torch.device("cpu"))
    strategy.start(model)
    parameters = [parameter for _, parameter in strategy.trained(model)]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for step in range(updates):
        wires = [*strategy.engines, *([] if rows is None else [rows.wire(SHARD)])]
        for wire in wires:
            wire.meter.clear()
        for part in range(2):
            seed = 100 * step + 10 * part + ranks.rank
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))
            strategy.before_backward(last=part == 1)
            (model(x).square().sum() / (8 * ranks.size)).backward()
        strategy.after_backward()
        strategy.update(optimizer)
        strategy.updated()
        optimizer.zero_grad(set_to_none=True)
    wires = [*strategy.engines, *([] if rows is None else [rows.wire(SHARD)])]
    sent = sum((Counter(wire.meter.bytes) for wire in wires), Counter())
    return {name: whole(p.detach()).clone() for name, p in strategy.trained(model)}, dict(sent)


@ranked
@pytest.mark.parametrize("ranks", [2, 3])
def test_on_fsdp_its_sums_are_the_libraries_and_halve_what_travels(pool: Pool, ranks: int) -> None:
    plain, bytes_plain = pool.run(sharded, None, ranks=ranks)[0]
    for found, sent in pool.run(sharded, DenseSums(), ranks=ranks):
        assert all(torch.equal(found[name], plain[name]) for name in plain)
        assert sent == bytes_plain
    for dtype, scale in (("bf16", 1.0), ("fp16", 64.0)):
        value = DenseSums(dtype=dtype, scale=scale)
        each = pool.run(sharded, value, ranks=ranks)
        for found, sent in each:
            assert all(torch.equal(found[name], each[0][0][name]) for name in plain)
            assert 2 * sent["all_to_all"] == bytes_plain["reduce_scatter"]
        far = max(float((each[0][0][name] - plain[name]).abs().max()) for name in plain)
        assert 0 < far < 0.02


def test_the_ledger_of_fsdp_has_its_sums_and_fsdps_gathers() -> None:
    parts = GatheredGroups(Group(((24, 8), (24,))), (Group(((8, 8),)),), Layout(shards=2))
    cut = cut_ledger(Ledger(), parts, micro_batches=3, reshard_after_forward=True, recompute=False)
    dense = {dtype: summed_on_sharded(cut, parts, micro_batches=3,
                                      exchange=DenseSums(dtype=dtype).ledger_of_rows)
             for dtype in ("fp32", "bf16")}  # fmt: skip
    assert dense["fp32"].peak() == cut.peak()
    assert sorted(map(str, dense["fp32"].wire)) == sorted(map(str, cut.wire))
    sent = {wire.collective: wire for wire in dense["bf16"].wire}
    scattered = next(wire for wire in cut.wire if wire.collective == "reduce_scatter")
    assert (2 * sent["all_to_all"].bytes, sent["all_to_all"].count) == (
        scattered.bytes,
        scattered.count,
    )
    assert sent["all_gather"] in cut.wire


def test_it_goes_with_replicas_of_shards() -> None:
    for parallel, ranks in (({"strategy": "fsdp"}, 2), ({"strategy": "fsdp", "shard": 2}, 4)):
        assert layouts(Recipe(comm={"method": "dense_sums"}, parallel=parallel), ranks)
