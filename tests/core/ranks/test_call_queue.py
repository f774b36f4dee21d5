"""The thread that gives calls their turn: order, bits and figures as without it, and no traces."""

from __future__ import annotations

import gc
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor

from modicum.core.machine.memory import TensorMeter
from modicum.core.ranks.call_queue import THREAD, CollectiveHandle
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.observed_calls import CallLog, naming
from modicum.core.ranks.observed_groups import observing
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import PeerLost, Ranks
from modicum.core.ranks.row_sums import RowSum, sum_in_order


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def until(condition: Any, seconds: float = 20.0) -> bool:
    """Whether it comes to hold, while this thread sleeps."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def asked(engine: Collectives, count: int, elements: int, rank: int) -> list[CollectiveHandle]:
    """As many reduce-scatters and gathers, in turns."""
    handles = []
    for n in range(count):
        whole = torch.full((engine.size * elements,), float(n + rank))
        if n % 2:
            handles.append(engine.all_gather(whole[:elements], label=str(n)))
        else:
            handles.append(engine.reduce_scatter(whole, label=str(n)))
    return handles


def right(handles: list[CollectiveHandle], elements: int, size: int) -> bool:
    for n, handle in enumerate(handles):
        if n % 2:
            wanted = torch.cat([torch.full((elements,), float(n + r)) for r in range(size)])
        else:
            wanted = torch.full((elements,), float(sum(n + r for r in range(size))))
        if not torch.equal(handle.wait(), wanted):
            return False
    return True


def computing(ranks: Ranks, elements: int, latency: float) -> Any:
    link = Link(latency=latency) if latency else None
    engine = Collectives(ranks, in_flight=1, link=link)
    with observing(CallLog()) as log:
        time.sleep(0.3 * min(1, ranks.rank))  # so that rank 0's first call takes that long
        with naming("outer"):
            handles = asked(engine, 6, elements, ranks.rank)
            handles.append(engine.all_reduce(torch.ones(3)))
        begun = len(log.calls)
        # Nothing of the engine's is called: so this thread computes.
        through = until(lambda: handles[-1].done)
        named = threads()
        same = right(handles[:-1], elements, ranks.size)
    gone = until(lambda: not threads())
    calls = [(call.sequence, call.kind, call.label) for call in log.calls]
    late = all(call.begun > call.asked for call in log.calls)
    slept = log.calls[-1].begun - log.calls[0].begun
    return begun, through, named, same, gone, calls, late, slept, dict(engine.meter.calls)


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "elements"), [(2, 5), (2, 400_000), (3, 1000)])
def test_calls_have_their_turn_while_the_one_that_asked_computes(
    pool: Pool, ranks: int, elements: int
) -> None:
    kinds = ["reduce-scatter", "all-gather"] * 3
    wanted = [(n, kind, str(n)) for n, kind in enumerate(kinds)] + [(6, "all-reduce", "outer")]
    meter = {"reduce_scatter": 3, "all_gather": 3, "all_reduce": 1}
    for rank, found in enumerate(pool.run(computing, elements, 0.0, ranks=ranks)):
        begun, through, named, same, gone, calls, late, _, metered = found
        assert rank or begun == 1
        assert through
        assert named in ([], [THREAD])
        assert same
        assert gone
        assert calls == wanted
        assert late
        assert metered == meter


@pytest.mark.ranks
def test_a_pretended_link_has_one_call_after_the_other(pool: Pool) -> None:
    for found in pool.run(computing, 5, 0.02, ranks=2):
        assert found[1]
        assert found[5][-1] == (6, "all-reduce", "outer")
        assert found[7] >= 6 * 0.02


KINDS = ("fp32", "bf16", "fp64")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def at_random(ranks: Ranks, seed: int, *, thread: bool) -> Any:
    """Calls of random kinds, sizes and dtypes, waited for late or early, with pauses."""
    alike, own = random.Random(seed), random.Random(1000 * seed + ranks.rank)
    engine = Collectives(ranks, in_flight=alike.choice([1, 2, 4]))
    if not thread:
        engine._queue.close()
    most = 0
    begin = CollectiveHandle.begin

    def counted(handle: CollectiveHandle, link: Link | None) -> None:
        nonlocal most
        queue = engine._queue
        most = max(most, 1 + len(queue._begun) + (queue._made is not None))
        begin(handle, link)

    results: list[Tensor] = []
    waiting: list[CollectiveHandle] = []
    with pytest.MonkeyPatch.context() as patched, observing(CallLog()) as log:
        patched.setattr(CollectiveHandle, "begin", counted)
        for n in range(30):
            size = alike.choice([3, 1000, 200_000])
            generator = torch.Generator().manual_seed(100 * n + ranks.rank)
            values = torch.randn(ranks.size * size, generator=generator)
            values = values.to(DTYPES[alike.choice(KINDS)])
            kind = alike.choice(["sum", "gather", "all", "exchange"])
            if kind == "sum":
                waiting.append(engine.reduce_scatter(values, label=f"{n}"))
            elif kind == "gather":
                waiting.append(engine.all_gather(values[:size], label=f"{n}"))
            elif kind == "all":
                waiting.append(engine.all_to_all(values, label=f"{n}"))
            else:
                waiting.append(engine.all_or(values.view(torch.uint8).clone(), label=f"{n}"))
            time.sleep(own.choice([0, 0, 0.003]))
            if own.random() < 0.2:
                engine.progress()
            if own.random() < 0.3:
                waiting[own.randrange(len(waiting))].wait()
        results = [handle.wait() for handle in waiting]
    calls = [(call.sequence, call.kind, call.label, call.bytes) for call in log.calls]
    return results, calls, engine.meter, most <= engine._queue.in_flight, len(engine._queue)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_calls_are_those_of_no_thread_to_the_bit(pool: Pool, ranks: int) -> None:
    for seed in range(3):
        without = pool.run(unthreaded, seed, ranks=ranks)
        with_one = pool.run(threaded, seed, ranks=ranks)
        for (a, *others), (b, *others_too) in zip(without, with_one, strict=True):
            assert others == others_too
            assert others[2:] == [True, 0]
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def threaded(ranks: Ranks, seed: int) -> Any:
    return at_random(ranks, seed, thread=True)


def unthreaded(ranks: Ranks, seed: int) -> Any:
    return at_random(ranks, seed, thread=False)


def many(engine: Collectives) -> None:
    handles = [engine.reduce_scatter(torch.ones(600_000)) for _ in range(8)]
    time.sleep(1.0)  # by now the thread knows
    for handle in handles:
        handle.wait()


def bereft(ranks: Ranks) -> Any:
    engine = Collectives(ranks, in_flight=1)
    right(asked(engine, 2, 5, ranks.rank), 5, ranks.size)
    if ranks.rank:
        os._exit(1)
    told = []
    for _ in range(2):
        with pytest.raises(PeerLost) as lost:
            many(engine)
        told.append(str(lost.value))
    return told, until(lambda: not threads(), 2.0)


@pytest.mark.ranks
def test_what_the_thread_learns_of_a_lost_rank_is_raised_where_one_waits(pool: Pool) -> None:
    ((told, gone), _) = pool.run(bereft, lost=[1])
    assert all("another rank is gone, so this one ends; the same command" in one for one in told)
    assert gone


def metered(ranks: Ranks) -> Any:
    peaks = []
    for closed in (True, False):
        engine = Collectives(ranks, in_flight=2)
        if closed:
            engine._queue.close()
        wholes = [torch.ones(ranks.size * 500_000) for _ in range(5)]
        with TensorMeter("cpu") as meter:
            handles = [engine.reduce_scatter(whole) for whole in wholes]
            time.sleep(0.3)
            found = threads()
            for handle in handles:
                handle.wait()
        peaks.append((meter.peak, found))
    return peaks


@pytest.mark.ranks
def test_what_a_meter_counts_is_allocated_where_it_counts(pool: Pool) -> None:
    for (without, _), (with_one, found) in pool.run(metered, ranks=2):
        assert found == []
        assert without == with_one
        # At least what two calls receive, and five sums.
        assert with_one >= 2 * 2 * 500_000 * 4 + 4 * 500_000 * 4


def dropped(ranks: Ranks) -> Any:
    """An engine that nobody has any more, with calls that the other rank never makes."""
    engine = Collectives(ranks, in_flight=1)
    if ranks.rank == 0:
        for _ in range(4):
            engine.all_gather(torch.ones(3))
    time.sleep(0.1)
    before = threads()
    del engine
    gc.collect()
    return before, until(lambda: not threads(), 2.0)


@pytest.mark.ranks
def test_an_engine_that_is_gone_leaves_no_thread(pool: Pool) -> None:
    (before, gone), (_, none) = pool.run(dropped)
    assert before == [THREAD]
    assert gone
    assert none


EXITING = """
import sys, threading, time, torch
from modicum.core.ranks.call_queue import THREAD
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import joined

with joined() as ranks:
    engine = Collectives(ranks, in_flight=1, link=Link(latency=0.01))
    handles = [engine.reduce_scatter(torch.ones(2 * 400_000)) for _ in range(300)]
    handles[3].wait()
    ranks.gather(True)
    print(sum(thread.name == THREAD for thread in threading.enumerate()), flush=True)
    sys.exit(7)
"""


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_process_ends_as_it_says_while_calls_wait(tmp_path: Path) -> None:
    script = tmp_path / "exiting.py"
    script.write_text(EXITING)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(script)]
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        )
    try:
        ends = [(*process.communicate(timeout=90), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for said, wrong, code in ends:
        assert (code, said) == (7, "1\n"), wrong
        assert "terminate" not in wrong


def in_batches(ranks: Ranks, seed: int, sizes: list[int]) -> Any:
    """Batches of calls with priorities; each rank computes, and waits, at moments of its own."""
    alike, own = random.Random(seed), random.Random(1000 * seed + ranks.rank)
    engine = Collectives(ranks, in_flight=3)
    results: list[Tensor] = []
    under_way: list[list[int]] = []
    begin = CollectiveHandle.begin

    def seen(handle: CollectiveHandle, link: Link | None) -> None:
        queue = engine._queue
        others = [*queue._begun, *([queue._made] if queue._made else [])]
        under_way.append([handle.priority, *(other.priority for other in others)])
        begin(handle, link)

    with pytest.MonkeyPatch.context() as patched, observing(CallLog()) as log:
        patched.setattr(CollectiveHandle, "begin", seen)
        for batch in range(3):
            handles = []
            with engine.batch():
                for n in range(5):
                    priority = alike.randrange(3)
                    values = torch.full((ranks.size * alike.choice(sizes),), float(n + ranks.rank))
                    label = f"{batch}/{n} of {priority}"
                    handles.append(
                        engine.reduce_scatter(values, label=label, priority=priority)
                        if alike.random() < 0.5
                        else engine.all_gather(values, label=label, priority=priority)
                    )
                if batch == 1:
                    handles[2].wait()
                    handles.append(engine.all_reduce(torch.ones(3), label="1/5 of 0"))
            time.sleep(own.choice([0, 0.004]))
            results += [handle.wait() for handle in handles]
    return results, [call.label for call in log.calls], under_way


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_priorities_give_one_order_on_all_ranks_and_the_same_bits(pool: Pool, ranks: int) -> None:
    for seed in (1, 2):
        found = pool.run(in_batches, seed, [3, 50_000, 200_000], ranks=ranks)
        labels = found[0][1]
        for _, others, under_way in found:
            assert others == labels
            # None begins while one that goes first is under way.
            assert all(own <= min(beside, default=own) for own, *beside in under_way)
        for batch in ("0", "2"):
            names = [label for label in labels if label.startswith(batch)]
            order = [(int(label[-1]), int(label[2])) for label in names]
            assert order == sorted(order)
        # What is waited for lets those before it begin; what comes after it is behind them.
        *before, last = [label for label in labels if label.startswith("1")]
        order = [(int(label[-1]), int(label[2])) for label in before]
        assert (order, last) == (sorted(order), "1/5 of 0")
        plain = pool.run(in_order_asked, seed, [3, 50_000, 200_000], ranks=ranks)
        for (results, *_), wanted in zip(found, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def in_order_asked(ranks: Ranks, seed: int, sizes: list[int]) -> Any:
    """The results of the same calls, each waited for where it is asked for."""
    alike, engine, results = random.Random(seed), Collectives(ranks), []
    for batch in range(3):
        for n in range(5):
            alike.randrange(3)
            values = torch.full((ranks.size * alike.choice(sizes),), float(n + ranks.rank))
            call = engine.reduce_scatter if alike.random() < 0.5 else engine.all_gather
            results.append(call(values).wait())
        if batch == 1:
            results.append(engine.all_reduce(torch.ones(3)).wait())
    return results


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 60), st.lists(st.integers(1, 30), max_size=5), st.data())
def test_a_sum_in_stretches_has_the_bits_of_one_at_once(
    rows: int, size: int, stretches: list[int], data: Any
) -> None:
    values = [data.draw(st.floats(width=32, allow_nan=False)) for _ in range(3)]
    matrix = torch.tensor(values).repeat(rows * size)[: rows * size].view(rows, size).clone()
    total = RowSum(matrix)
    for stretch in stretches:
        total.stretch(stretch)
    torch.testing.assert_close(total(), sum_in_order(matrix), rtol=0, atol=0, equal_nan=True)


def test_halves_and_small_sums_are_left_to_who_waits() -> None:
    assert not RowSum.suits(torch.zeros(2, 10**6, dtype=torch.bfloat16))
    assert not RowSum.suits(torch.zeros(2, 10))
    assert RowSum.suits(torch.zeros(2, 10**6, dtype=torch.float64))
