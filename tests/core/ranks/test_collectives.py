"""Collectives against sums and concatenations done by hand, and against what the wire carried."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor

from modicum.core.ranks.collectives import Collectives, Meter
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import PeerLost, Ranks
from modicum.core.ranks.row_sums import sum_in_order

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int": torch.int32}


def buffer(rank: int, elements: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + elements)
    if kind == "int":
        return torch.randint(-99, 99, (elements,), generator=generator, dtype=torch.int32)
    return torch.randn(elements, generator=generator).to(KINDS[kind])


def exchanged(ranks: Ranks, shards: list[int], kind: str, in_flight: int) -> Any:
    engine = Collectives(ranks, in_flight=in_flight)
    wholes = [buffer(ranks.rank, ranks.size * n, kind) for n in shards]
    handles = [engine.reduce_scatter(whole) for whole in wholes]
    sums = [handle.wait() for handle in reversed(handles)][::-1]
    gathers = [engine.all_gather(part) for part in sums]
    summed = [engine.all_reduce(whole.clone()).wait() for whole in wholes]
    return [handle.wait() for handle in gathers], summed, engine.meter


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_parts_are_those_done_by_hand(pool: Pool, kind: str, ranks: int) -> None:
    shards = [5, 1, 1000, 3, 0, 77]
    results = pool.run(exchanged, shards, kind, 1 + ranks % 3, ranks=ranks)
    for n, place in zip(shards, range(len(shards)), strict=True):
        rows = torch.stack([buffer(rank, ranks * n, kind) for rank in range(ranks)])
        wanted = rows[0].to(torch.float64 if kind == "int" else torch.float32)
        for row in rows[1:]:
            wanted = wanted + row
        for gathered, summed, _ in results:
            assert torch.equal(gathered[place], wanted.to(KINDS[kind]))
            torch.testing.assert_close(summed[place].float(), wanted.float(), rtol=0.03, atol=0.03)
    each = KINDS[kind].itemsize * sum(shards) * (ranks - 1)
    for *_, meter in results:
        assert meter == Meter(
            {"reduce_scatter": each, "all_gather": each, "all_reduce": 2 * each},  # type: ignore[arg-type]
            {"reduce_scatter": 6, "all_gather": 6, "all_reduce": 6},  # type: ignore[arg-type]
        )


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 39))
def test_an_elements_sum_is_the_same_wherever_it_stands(ranks: int, size: int, cut: int) -> None:
    rows = torch.stack([buffer(rank, size, "fp32") for rank in range(ranks)])
    cut = min(cut, size)
    apart = [sum_in_order(rows[:, :cut]), sum_in_order(rows[:, cut:])]
    assert torch.equal(torch.cat(apart), sum_in_order(rows))


def test_half_precision_is_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert float(sum_in_order(rows)) == 258.0  # 256 + 1 alone would be 256


def timeouts(ranks: Ranks) -> list[float]:
    cpu = torch.device("cpu")
    groups = [dist.distributed_c10d._get_default_group(), Collectives(ranks)._group]
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]


@pytest.mark.ranks
def test_its_calls_may_take_as_long_as_those_of_the_script(pool: Pool) -> None:
    assert pool.run(timeouts) == [[300.0, 300.0]] * 2  # as `pool` has made the group


def totals(ranks: Ranks) -> float:
    engine = Collectives(ranks)
    return float(engine.total(torch.tensor(0.1 * (ranks.rank + 1), dtype=torch.float64)))


@pytest.mark.ranks
def test_a_total_is_the_same_on_every_rank(pool: Pool) -> None:
    assert set(pool.run(totals, ranks=4)) == {0.1 + 0.2 + 0.1 * 3 + 0.4}


BITS = {"bool": torch.bool, "uint8": torch.uint8, "int16": torch.int16, "int64": torch.int64}


def bits_of(rank: int, elements: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(7 * rank + elements)
    if kind == "bool":
        return torch.rand(elements, generator=generator) < 0.3
    most = torch.iinfo(BITS[kind])
    return torch.randint(most.min, most.max, (elements,), generator=generator, dtype=BITS[kind])


def either(ranks: Ranks, sizes: list[int], kind: str) -> Any:
    engine = Collectives(ranks)
    handles = [engine.all_or(bits_of(ranks.rank, n, kind), label="flags") for n in sizes]
    return [handle.wait() for handle in handles], engine.meter.bytes["all_reduce"]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", BITS)
def test_an_or_has_the_bits_of_every_rank(pool: Pool, kind: str, ranks: int) -> None:
    sizes = [1, 1000, 37, 0]
    for found, sent in pool.run(either, sizes, kind, ranks=ranks):
        for n, each in zip(sizes, found, strict=True):
            wanted = bits_of(0, n, kind)
            for rank in range(1, ranks):
                wanted = wanted | bits_of(rank, n, kind)
            assert each.dtype == BITS[kind]
            assert torch.equal(each, wanted)
        width = BITS[kind].itemsize
        assert sent == sum(2 * (ranks - 1) * width * n // ranks for n in sizes)


def test_an_or_of_numbers_that_are_no_integers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"integers or bools were expected, not torch\.float32"):
        Collectives(Ranks()).all_or(torch.ones(2))


def to_each(ranks: Ranks, kind: str) -> Any:
    """Rank r sends 10 r + s numbers to rank s, which does not know how many; nothing to rank 2."""
    engine = Collectives(ranks)
    sent = [0 if to == 2 else 10 * ranks.rank + to for to in range(ranks.size)]
    received = engine.all_to_all(torch.tensor(sent)).wait().tolist()
    before = engine.meter.bytes["all_to_all"]
    buffer_ = torch.cat([torch.full((n,), 100 * ranks.rank + to) for to, n in enumerate(sent)])
    result = engine.all_to_all(buffer_.to(KINDS[kind]), sent=sent, received=received).wait()
    return result, received, engine.meter.bytes["all_to_all"] - before


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int"])
def test_parts_of_unequal_sizes_arrive_in_the_order_of_the_ranks(
    pool: Pool, kind: str, ranks: int
) -> None:
    for rank, (result, received, sent) in enumerate(pool.run(to_each, kind, ranks=ranks)):
        counts = [0 if rank == 2 else 10 * other + rank for other in range(ranks)]
        assert received == counts
        wanted = [torch.full((n,), 100 * other + rank) for other, n in enumerate(counts)]
        assert torch.equal(result, torch.cat(wanted).to(KINDS[kind]))
        others = sum(10 * rank + to for to in range(ranks) if to not in (2, rank))
        assert sent == KINDS[kind].itemsize * others


@pytest.mark.parametrize(
    ("sent", "received", "wrong"),
    [
        ([3], None, "need both what is sent and what comes"),
        ([2], [2], r"do not make up a buffer of 3"),
        ([3], [2], r"another part of itself"),
        ([3, 0], [3, 0], "a size for each of 1 ranks"),
    ],
)
def test_parts_that_are_none_of_the_buffer_are_refused(
    sent: Any, received: Any, wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        Collectives(Ranks()).all_to_all(torch.ones(3), sent=sent, received=received)


def in_order(ranks: Ranks) -> Any:
    engine = Collectives(ranks, in_flight=1)
    handles = [engine.all_gather(torch.full((2,), float(n + ranks.rank))) for n in range(4)]
    waiting = len(engine._queue)
    total = ranks.sum(1.0)[0]
    while not handles[3].done:
        engine.progress()
    return waiting <= 4, total, [handle.wait().tolist() for handle in handles]


@pytest.mark.ranks
def test_calls_that_wait_for_their_turn_do_not_disturb_other_groups(pool: Pool) -> None:
    wanted = [[n, n, n + 1.0, n + 1.0] for n in range(4)]
    assert pool.run(in_order) == [(True, 2.0, wanted)] * 2


def often(engine: Collectives) -> None:
    for _ in range(20):
        engine.reduce_scatter(torch.ones(1000)).wait()


def left(ranks: Ranks) -> str:
    engine = Collectives(ranks)
    if ranks.rank:
        os._exit(1)
    with pytest.raises(PeerLost) as lost:
        often(engine)
    return str(lost.value)


@pytest.mark.ranks
def test_a_rank_that_is_gone_is_told(pool: Pool) -> None:
    (told, _) = pool.run(left, lost=[1])
    assert "another rank is gone" in told


def test_alone_every_call_is_the_identity() -> None:
    engine = Collectives(Ranks(), link=Link(rate=1.0))
    x = torch.arange(5.0)
    into = torch.zeros(5)
    assert torch.equal(engine.all_gather(engine.reduce_scatter(x).wait(), into).wait(), x)
    assert torch.equal(into, x)
    assert torch.equal(engine.all_reduce(x).wait(), torch.arange(5.0))
    assert float(engine.total(torch.tensor(3.0))) == 3.0
    assert sum(engine.meter.bytes.values()) == 0


def test_buffers_that_cannot_be_cut_are_refused() -> None:
    engine = Collectives(Ranks())
    engine.size = 2
    for wrong in (torch.ones(3), torch.ones(2, 2), torch.ones(8)[::2]):
        with pytest.raises(ValueError, match="flat buffer of 2 equal parts"):
            engine.reduce_scatter(wrong)
    with pytest.raises(ValueError, match="do not fill"):
        engine.all_gather(torch.ones(3), into=torch.ones(5))


def test_a_link_adds_up_steps_and_bytes_one_call_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    link = Link(rate=100.0, latency=0.5)
    assert link.reserve(50, 3) == pytest.approx(12.0)
    now = 11.0
    assert link.reserve(100, 1) == pytest.approx(13.5)  # begins when the first is through
    now = 20.0
    assert link.reserve(0, 0) == pytest.approx(20.0)


def over_a_link(ranks: Ranks) -> Any:
    engine = Collectives(ranks, link=Link(rate=1e4))
    slept: list[float] = []
    handle = engine.all_gather(torch.ones(25_000))
    before = handle.done
    sleep, time.sleep = time.sleep, slept.append  # type: ignore[assignment]
    try:
        dist.barrier()
        handle.wait()
    finally:
        time.sleep = sleep
    return before, sum(slept)


@pytest.mark.ranks
def test_a_handle_is_done_when_the_links_time_is_over(pool: Pool) -> None:
    for before, slept in pool.run(over_a_link):
        assert not before
        assert 0 < slept <= 10  # what is left of 100 KB at 10 KB/s


# In a network namespace of its own, the loopback carries this alone.
COUNTED = """
import json, sys
from modicum.proofs.ranks import at_ranks
print(json.dumps(at_ranks("counted:counted", int(sys.argv[1]))))
"""
WORKER = """
import time
import torch, torch.distributed as dist
from modicum.core.ranks.collectives import Collectives

def sent():
    for line in open("/proc/net/dev"):
        if line.strip().startswith("lo:"):
            return int(line.split()[9])

def counted(ranks):
    engine, found = Collectives(ranks), {}
    buffer = torch.ones(ranks.size * 300_000)
    shard = torch.ones(300_000)
    calls = {"reduce_scatter": lambda: engine.reduce_scatter(buffer),
             "all_gather": lambda: engine.all_gather(shard),
             "all_reduce": lambda: engine.all_reduce(buffer)}
    for name, call in calls.items():
        call().wait()
        dist.barrier(); time.sleep(0.1)
        before = sent()
        dist.barrier()
        engine.meter.clear()
        call().wait()
        dist.barrier(); time.sleep(0.1)
        found[name] = [sent() - before, engine.meter.bytes[name]]
        dist.barrier()
    return found
"""


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_meter_is_what_the_wire_carries(tmp_path: Any, ranks: int) -> None:
    own = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    up = [*own, "ip link set lo up"]
    if not shutil.which("unshare") or subprocess.run(up, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    (tmp_path / "counted.py").write_text(WORKER)
    (tmp_path / "main.py").write_text(COUNTED)
    command = f"ip link set lo up && exec {sys.executable} main.py {ranks}"
    done = subprocess.run(
        [*own, command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    found = json.loads(done.stdout)
    for name in found[0]:
        carried = max(rank[name][0] for rank in found)
        metered = sum(rank[name][1] for rank in found)
        assert metered <= carried <= 1.03 * metered + 20_000, name
