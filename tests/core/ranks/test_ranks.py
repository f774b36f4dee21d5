from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import socket
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from modicum.core.errors import InputError, Interrupted, ModicumError
from modicum.core.ranks import ranks as module
from modicum.core.ranks.ranks import PeerLost, Ranks, joined, peer_errors

SIZES = (1, 2, 3, 4)
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VALUES: list[Any] = [
    None,
    "",
    [],
    {},
    0,
    False,
    "Grüße, 世界 \U0001f40d\u2028\x00",
    {"ключ": [1.5, -0.0, 1e-300, 2**53], "": {"a": None}},
    {"big": ["abcdefgh" * 10] * 10_000},
]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


# Exchanges of numbers and of JSON.


def exchange_numbers(ranks: Ranks) -> dict[str, list[float]]:
    mine = (0.1 * (ranks.rank + 1), -float(ranks.rank), 2.0**53 * ranks.first + 1)
    return {
        "sum": ranks.sum(*mine),
        "most": ranks.max(*mine),
        "least": ranks.min(*mine),
        "none": ranks.sum(),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
def test_numbers_are_reduced_in_double_precision(pool: Pool, size: int) -> None:
    tenths = [0.1 * (rank + 1) for rank in range(size)]
    for found in pool.run(exchange_numbers, ranks=size):
        total, negative, large = found["sum"]
        assert total == pytest.approx(sum(tenths), rel=1e-15)
        # fp32 would lose the ones beside 2^53; so would an order that adds them one by one.
        assert (negative, large) in [
            (-sum(range(size)), 2.0**53 + extra) for extra in range(size + 1)
        ]
        assert found["most"] == [max(tenths), 0.0, 2.0**53 + 1]
        assert found["least"] == [0.1, 1.0 - size, 1.0 if size > 1 else 2.0**53 + 1]
        assert found["none"] == []


def tell_all(ranks: Ranks, values: list[Any]) -> list[Any]:
    return [ranks.broadcast(value if ranks.first else {"ignored": ranks.rank}) for value in values]


def gather_all(ranks: Ranks, values: list[Any]) -> list[list[Any]]:
    """Every rank gives another of the values, so that their lengths differ."""
    shifted = values[ranks.rank :] + values[: ranks.rank]
    return [ranks.gather(value) for value in shifted]


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_hears_rank_0(pool: Pool, size: int) -> None:
    for heard in pool.run(tell_all, VALUES, ranks=size):
        assert json.dumps(heard) == json.dumps(VALUES)


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_every_value_in_order(pool: Pool, size: int) -> None:
    expected = [
        [VALUES[(turn + rank) % len(VALUES)] for rank in range(size)] for turn in range(len(VALUES))
    ]
    for gathered in pool.run(gather_all, VALUES, ranks=size):
        assert json.dumps(gathered) == json.dumps(expected)


def gather_what_is_no_json(ranks: Ranks) -> str:
    try:
        ranks.gather({1, 2})
    except TypeError as error:
        return str(error)
    return "gathered"


@pytest.mark.ranks
def test_nothing_but_json_is_sent(pool: Pool) -> None:
    assert pool.run(gather_what_is_no_json) == ["Object of type set is not JSON serializable"] * 2


# Rank 0 first.


def write_in_turns(ranks: Ranks, path: str, turns: int) -> list[int]:
    def work(turn: int) -> int:
        if ranks.first:
            time.sleep(0.05)  # time enough for the others to overtake
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{turn} {ranks.rank}\n")
        return 10 * turn + ranks.rank

    results = []
    for turn in range(turns):
        results.append(ranks.first_alone(lambda turn=turn: work(turn)))
        ranks.sum(0.0)
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rank_0_works_before_the_others(pool: Pool, tmp_path: Path, size: int) -> None:
    path = tmp_path / "order.txt"
    results = pool.run(write_in_turns, str(path), 3, ranks=size)
    assert results == [[10 * turn + rank for turn in range(3)] for rank in range(size)]
    written = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    for turn, lines in itertools.groupby(written, key=lambda line: line[0]):
        order = [rank for _, rank in lines]
        assert order[0] == "0", f"turn {turn}: {order}"
        assert sorted(order) == [str(rank) for rank in range(size)]


def join_and_write(ranks: Ranks, path: str) -> None:
    for _ in range(2):
        with joined() as found:  # another object for the same group
            write_in_turns(found, path, 1)


@pytest.mark.ranks
def test_rank_0_works_first_whenever_the_group_is_joined(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    pool.run(join_and_write, str(path))
    assert path.read_text(encoding="utf-8").splitlines() == ["0 0", "0 1"] * 2


def be_asked_while_waiting(ranks: Ranks, path: str) -> str:
    def work() -> str:
        while ranks.first and not Path(path).exists():
            time.sleep(0.01)
        return "worked"

    def check() -> None:
        Path(path).touch()
        raise Interrupted("asked to stop")

    try:
        return ranks.first_alone(work, check)
    except Interrupted as error:
        return str(error)


@pytest.mark.ranks
def test_who_waits_for_rank_0_can_be_interrupted(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(be_asked_while_waiting, str(tmp_path / "asked"), ranks=2)
    assert found == ["worked", "asked to stop"]


# The same everywhere.


def compare(ranks: Ranks, values: list[dict[str, Any]]) -> str:
    def explain(first: dict[str, Any], other: dict[str, Any]) -> str:
        return ", ".join(f"{key}: {first[key]} -> {other[key]}" for key in first)

    try:
        ranks.same("recipe", values[ranks.rank], explain)
    except InputError as error:
        return str(error)
    return "the same"


@pytest.mark.ranks
def test_a_difference_is_named_on_all_ranks(pool: Pool) -> None:
    same, other = {"steps": 10}, {"steps": 20}
    assert pool.run(compare, [same] * 3, ranks=3) == ["the same"] * 3
    told = "rank 2 has another recipe than rank 0: steps: 10 -> 20"
    assert pool.run(compare, [same, same, other], ranks=3) == [told] * 3


# One process.


def test_alone_every_exchange_is_the_identity() -> None:
    ranks, value = Ranks(), object()
    assert ranks.alone
    assert ranks.first
    assert (ranks.sum(1.5), ranks.max(2.0, 3.0), ranks.min()) == ([1.5], [2.0, 3.0], [])
    assert ranks.broadcast(value) is value
    assert ranks.gather(value) == [value]
    assert ranks.first_alone(lambda: 7) == 7
    ranks.same("recipe", {"a": 1}, lambda *_: "nothing differs")


def test_a_rank_is_named_with_its_host_where_there_are_several() -> None:
    assert Ranks(1, 4, 1, 4).name == "rank 1"
    assert Ranks(3, 4, 1, 2).name == f"rank 3 on {socket.gethostname()}"


# A rank that is gone.


def _sum(ranks: Ranks) -> None:
    ranks.sum(1.0)


def _tell(ranks: Ranks) -> None:
    ranks.broadcast("x" * 100_000)


def _gather(ranks: Ranks) -> None:
    ranks.gather("x" * 100_000)


def _first_alone(ranks: Ranks) -> None:
    ranks.first_alone(lambda: None)


def _barrier(ranks: Ranks) -> None:
    with peer_errors():
        dist.barrier()


def _store(ranks: Ranks) -> None:
    with peer_errors():
        dist.distributed_c10d._get_default_store().get("never written")


EXCHANGES: dict[str, Callable[[Ranks], None]] = {
    "sum": _sum,
    "tell": _tell,
    "gather": _gather,
    "barrier": _barrier,
    "first_alone": _first_alone,
    "store": _store,
}


def exchange_with_the_dead(ranks: Ranks, name: str, victim: int, delay: float) -> str:
    ranks.sum(0.0)
    if ranks.rank == victim:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1 - delay)
    try:
        for _ in range(3):
            EXCHANGES[name](ranks)
    except PeerLost as error:
        dist.destroy_process_group()  # as `joined` does, so that who waits for this rank hears it
        return str(error)
    return "nobody is missed"


# What concerns the store, which rank 0 keeps, fails when that rank dies.
DEATHS = [(name, victim) for name in EXCHANGES for victim in (0, 1)]
DEATHS = [(n, v) for n, v in DEATHS if n not in ("first_alone", "store") or v == 0]


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("delay", [0.0, 0.1], ids=["before", "during"])
@pytest.mark.parametrize(("name", "victim"), DEATHS)
def test_a_killed_rank_is_missed_by_the_others(
    pool: Pool, name: str, victim: int, delay: float
) -> None:
    found = pool.run(exchange_with_the_dead, name, victim, delay, ranks=2, lost=[victim])
    assert found[victim] is None
    told = found[1 - victim]
    assert told.startswith("another rank is gone, so this one ends; the same command resumes")
    assert "\n" not in told


@pytest.mark.ranks
def test_all_others_miss_a_killed_rank(pool: Pool) -> None:
    """Also the one that exchanges nothing with it directly, in a ring of four."""
    found = pool.run(exchange_with_the_dead, "sum", 2, 0.1, ranks=4, lost=[2])
    assert [told is not None and told[:20] for told in found] == [
        "another rank is gone",
        "another rank is gone",
        False,
        "another rank is gone",
    ]


# What torch 2.13 was seen to raise when a peer was killed, hung or could not be reached.
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
HINT = "Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
GONE = [
    RuntimeError(
        f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:31933. This is typically caused "
        f"by a remote worker crashing. {HINT}"
    ),
    RuntimeError(
        f"{GLOO}pair.cc:537] Read error [127.0.0.1]:14253: Connection reset by peer. This is "
        f"typically caused by a remote worker hanging or bugs in the application. {HINT}"
    ),
    RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to "),
    RuntimeError(f"{GLOO}unbound_buffer.cc:129] Timed out waiting 3000ms for send operation to "),
    dist.DistNetworkError("Broken pipe"),
    dist.DistNetworkError(
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown "
        "or crash?"
    ),
    dist.DistStoreError("wait timeout after 20000ms, keys: /default_pg/0//never"),
]
# And what is nobody else's fault, though some of it speaks of peers, sockets and time-outs.
NOT_GONE = [
    RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 1 (expected 3, got 4)"),
    RuntimeError("Cannot use ReduceOp.BAND with non-integral dtype"),
    RuntimeError("CUDA error: peer access is not supported between these two devices"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
    ),
    RuntimeError("the websocket layer has 3 weights, 2 are given"),
    RuntimeError("Read error in tokenizer.json"),
    ValueError("Connection closed by peer"),
]


@pytest.mark.parametrize("error", GONE, ids=lambda error: str(error)[-40:])
def test_what_a_lost_peer_makes_torch_say_is_understood(error: RuntimeError) -> None:
    with pytest.raises(PeerLost, match="another rank is gone") as caught, peer_errors():
        raise error
    assert caught.value.__cause__ is error
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("error", NOT_GONE, ids=lambda error: str(error)[:40])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, peer_errors():
        raise error
    assert caught.value is error


class _Group:
    """Stands for a process group, whose connections are open as long as it is alive."""


def _exchange_that_fails(group: _Group) -> None:
    raise RuntimeError(str(GONE[0]))


def test_a_handled_error_keeps_no_group_alive() -> None:
    """Else its connections stay open, and who exchanges with this rank alone waits for it."""
    group = _Group()
    alive = weakref.ref(group)
    gc.disable()
    try:
        try:
            with peer_errors():
                _exchange_that_fails(group)
        except PeerLost:
            pass
        del group
        assert alive() is None
    finally:
        gc.enable()


def test_a_store_that_nobody_writes_to_counts_as_a_lost_peer() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(PeerLost, match="never"), peer_errors():
        store.wait(["never"], timedelta(milliseconds=20))


# Joining.


def join(ranks: Ranks, port: int, victim: int | None) -> Any:
    """Leave the pool's group and join one as a process does that torchrun started."""
    dist.destroy_process_group()
    os.environ |= {"MASTER_PORT": str(port), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    try:
        with joined() as found:
            where = found.rank, found.size, found.local_rank, found.local_size
            total = found.sum(found.rank + 1.0)
            if victim is not None:
                if found.rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                found.gather("")
        return where, total, dist.is_initialized()
    except ModicumError as error:
        return type(error).__name__, error.exit_code, dist.is_initialized()


def join_again(ranks: Ranks) -> tuple[list[int], bool]:
    os.environ.pop("LOCAL_RANK")
    with joined() as found:
        inside = [found.rank, found.size, found.local_rank, found.local_size]
    return inside, dist.is_initialized()


@pytest.mark.ranks
def test_ranks_meet_as_the_environment_says(pool: Pool) -> None:
    assert pool.run(join, free_port(), None, ranks=3) == [
        ((rank, 3, 0, 1), [6.0], False) for rank in range(3)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_the_group_is_left_without_waiting_for_the_dead(pool: Pool, victim: int) -> None:
    found = pool.run(join, free_port(), victim, ranks=2, lost=[victim], timeout=30)
    assert found[1 - victim] == ("PeerLost", 4, False)


@pytest.mark.ranks
def test_a_group_that_is_there_is_used_and_left_as_it_is(pool: Pool) -> None:
    assert pool.run(join_again) == [([0, 2, 0, 2], True), ([1, 2, 1, 2], True)]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)

    def set_(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_


@pytest.mark.parametrize("values", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_one_process_makes_no_group(environment: Callable[..., None], values: dict) -> None:
    environment(**values)
    with joined() as ranks:
        assert ranks == Ranks()
        assert not dist.is_initialized()


PLACE = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "LOCAL_RANK"),
        (PLACE | {"LOCAL_RANK": "x"}, "LOCAL_RANK"),
        (PLACE | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK"),
        (PLACE | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE"),
        (PLACE, "MASTER_ADDR"),
        (PLACE | {"MASTER_ADDR": "localhost"}, "MASTER_PORT"),
        (PLACE | {"MASTER_ADDR": "localhost", "MASTER_PORT": "65536"}, "MASTER_PORT"),
    ],
)
def test_an_incomplete_environment_is_named(
    environment: Callable[..., None], values: dict[str, str], field: str
) -> None:
    environment(**values)
    with (
        pytest.raises(InputError, match=f"^the environment: {field}: .*--ranks N.*torchrun"),
        joined(),
    ):
        raise AssertionError("joined nobody")


@pytest.mark.parametrize("text", [str(error) for error in GONE[:2]] + [str(GONE[5])])
def test_a_rank_that_dies_while_they_meet_is_missed(
    environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """As when it is killed then: no mistake in the environment, so to be started again."""

    def die(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"Gloo connectFullMesh failed with {text}")

    environment(**PLACE, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    monkeypatch.setattr(module, "_meet", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", die)
    with pytest.raises(PeerLost, match="another rank is gone"), joined():
        raise AssertionError("joined nobody")


@pytest.mark.expensive
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_nobody_joins_give_up(
    environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(module, "MEETING", timedelta(seconds=1))
    port = str(free_port())
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    environment(**PLACE | place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    told = rf"rank {rank} could not reach the others at 127.0.0.1:{port} within 1 s.*: .*\Z"
    with pytest.raises(InputError, match=told), joined():
        raise AssertionError("joined nobody")
    assert not torch.distributed.is_initialized()
