"""Records of calls against what was called, and results with and without somebody who observes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.observed_calls import MESSAGES, CallLog, ObservedCall, observed
from modicum.core.ranks.observed_groups import METHODS, _follow, observing, wait_for_ends
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def trained(ranks: Ranks, kind: str) -> list[torch.Tensor]:
    """Weights after three updates."""
    made: Any = model()
    if kind == "ddp":
        made = DistributedDataParallel(made, bucket_cap_mb=1e-4)
    else:
        fully_shard(made)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + ranks.rank)
        made(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in made.parameters()]


def seen_and_unseen(ranks: Ranks, kind: str) -> Any:
    plain = trained(ranks, kind)
    with observing(CallLog()) as log:
        assert observed()
        shown = trained(ranks, kind)
    assert not observed()
    dist.barrier()
    same = all(torch.equal(a, b) for a, b in zip(plain, shown, strict=True))
    calls = [(c.kind, c.group, c.sequence, c.bytes, c.members) for c in log.calls]
    timed = all(c.asked <= c.begun <= c.ended and c.waited >= 0 for c in log.calls)
    return same, calls, timed, "allreduce" in dist.ProcessGroup.__dict__


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_calls_of_others_are_seen_and_change_nothing(pool: Pool, kind: str) -> None:
    results = pool.run(seen_and_unseen, kind, ranks=3)
    for same, calls, timed, _ in results:
        assert same
        assert timed
        assert calls == results[0][1] or kind == "ddp"  # DDP's rank 0 sends its weights first
        for group in {call[1] for call in calls}:
            numbers = [call[2] for call in calls if call[1] == group]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        kinds = [call[0] for call in calls if call[0] != "broadcast"]
        if kind == "ddp":
            gradients = 4 * sum(p.numel() for p in model().parameters())
            sent = sum(call[3] for call in calls if call[0] == "all-reduce")
            assert abs(sent - 3 * 2 * 2 * gradients / 3) <= 3 * kinds.count("all-reduce")
            assert kinds.count("all-reduce") >= 3
        else:
            assert kinds.count("reduce-scatter") == 3
            assert kinds.count("all-gather") >= 3
        assert {call[4] for call in calls} == {(0, 1, 2)}


def later(ranks: Ranks) -> Any:
    """A model that was wrapped before somebody observes."""
    made = DistributedDataParallel(model())
    with observing(CallLog()) as log:
        made(torch.ones(1, 6)).sum().backward()
    made(torch.ones(1, 6)).sum().backward()
    return [call.kind for call in log.calls]


@pytest.mark.ranks
def test_models_that_were_wrapped_before_are_seen(pool: Pool) -> None:
    for kinds in pool.run(later, ranks=2):
        assert set(kinds) == {"all-reduce"}


def labelled(ranks: Ranks) -> Any:
    engine = Collectives(ranks, link=Link(latency=0.02))
    with observing(CallLog()) as log:
        shard = engine.reduce_scatter(torch.ones(10), label="layers.17").wait()
        whole = engine.all_gather(shard, label="layers.18").wait()
        engine.all_reduce(torch.ones(4)).wait()
        engine.all_to_all(torch.ones(4), label="head").wait()
    engine.all_reduce(torch.ones(4), label="unseen").wait()
    calls = [(c.sequence, c.kind, c.label, c.bytes) for c in log.calls]
    shortest = min(c.ended - c.asked for c in log.calls)
    metered = sum(engine.meter.bytes.values()) - 16
    return calls, whole, metered, min(c.waited for c in log.calls), shortest


@pytest.mark.ranks
def test_the_engine_s_calls_have_its_names_labels_and_bytes(pool: Pool) -> None:
    for calls, whole, metered, waited, shortest in pool.run(labelled, ranks=2):
        assert shortest >= 0.02  # as the pretended link lets them
        assert calls == [
            (0, "reduce-scatter", "layers.17", 20),
            (1, "all-gather", "layers.18", 20),
            (2, "all-reduce", "", 16),
            (3, "all-to-all", "head", 8),
        ]
        assert torch.equal(whole, torch.full((10,), 2.0))
        assert sum(call[3] for call in calls) == metered
        assert waited >= 0


def sent_around(ranks: Ranks) -> Any:
    """Messages round a ring, by each of the ways to send one."""
    here, there = ranks.rank, (ranks.rank + 1) % ranks.size
    before = (here - 1) % ranks.size
    other = dist.new_group(list(reversed(range(ranks.size))))
    mine, come = torch.full((10,), float(here)), torch.zeros(3, 10)
    with observing(CallLog()) as log:
        works = [dist.isend(mine, there), dist.irecv(come[0], before)]
        unheard = [call.awaited for call in log.calls]
        for work in works:
            assert work is not None
            work.wait()
        operations = [
            dist.P2POp(dist.isend, mine, there, tag=7),
            dist.P2POp(dist.irecv, come[1], before, tag=7),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        first, second = (dist.send, dist.recv) if here else (dist.recv, dist.send)
        for call in (first, second):
            end = (mine, there) if call is dist.send else (come[2], before)
            call(*end, group=other)
        dist.barrier()
    calls = [(c.kind, c.group.partition(" ")[2], c.sequence, c.bytes, c.members) for c in log.calls]
    timed = all(
        c.begun <= c.awaited <= c.ended and 0 <= c.waited <= c.ended - c.awaited
        for c in log.calls
        if c.kind in MESSAGES
    )
    return calls, come[:, 0].tolist(), timed, all(one != one for one in unheard)


@pytest.mark.ranks
def test_messages_are_seen_at_both_ends(pool: Pool) -> None:
    for rank, (calls, come, timed, unheard) in enumerate(pool.run(sent_around, ranks=3)):
        there, before = (rank + 1) % 3, (rank - 1) % 3
        assert come == [before] * 3
        assert timed
        assert unheard  # who has begun a message does not wait for it yet
        sends = [("send", f"{rank}>{there}{tag}", 0, 40, (rank, there)) for tag in ("", " #7")]
        takes = [("recv", f"{before}>{rank}{tag}", 0, 0, (before, rank)) for tag in ("", " #7")]
        assert calls[:4] == [sends[0], takes[0], sends[1], takes[1]]
        # A group that counts its ranks otherwise.
        assert sorted(calls[4:6]) == sorted([sends[0], takes[0]])
        assert [(kind, number) for kind, _, number, *_ in calls[6:]] == [("barrier", 0)]


def test_nothing_is_wrapped_while_nobody_observes() -> None:
    def methods() -> dict[str, Any]:
        return {name: getattr(dist.ProcessGroup, name, None) for name in METHODS}

    before = methods()
    with observing(CallLog()), observing(CallLog()):
        assert methods() != before
    assert methods() == before


def test_alone_nothing_travels_and_nothing_is_seen() -> None:
    with observing(CallLog()) as log:
        Collectives(Ranks()).all_reduce(torch.ones(2), label="alone").wait()
    assert log.calls == []


class Work:
    """A call under way, whose end a test decides."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def get_future(self) -> Future[None]:
        return self.future


@pytest.mark.parametrize("fails", [False, True])
def test_who_ends_waits_until_open_calls_have_ended(fails: bool) -> None:
    work, call = Work(), ObservedCall(0, "barrier", "0", (0, 1), "", 0, 0.0, 0.0)
    _follow(call, (), work)
    waiting = threading.Thread(target=wait_for_ends, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    if fails:
        work.future.set_exception(RuntimeError("Connection closed by peer"))
    else:
        work.future.set_result(None)
    waiting.join(20)
    assert not waiting.is_alive()
    assert call.done is not fails


def two_calls() -> None:
    """In a default group that is made anew, so that its name is that of the last one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


def test_in_a_group_that_is_made_anew_numbers_continue() -> None:
    for _ in range(2):  # not those of before anybody observed
        with observing(CallLog()) as log:
            two_calls()
            two_calls()
        assert [call.sequence for call in log.calls] == [0, 1, 2, 3]
        assert len({call.group for call in log.calls}) == 1
