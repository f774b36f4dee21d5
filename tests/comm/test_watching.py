"""`watch` in real processes under bare DDP: killed, stopped, asleep, failing, and nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RanksFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes
from torch.nn.parallel import DistributedDataParallel

import modicum.comm
from modicum.comm.watch_agent import VERDICT, HostAgent
from modicum.comm.watching import Watch, is_of_a_peer
from modicum.core.errors import InputError
from modicum.core.ranks.call_ring import ENDED, FAILED, RUNNING, RingReader, RingState, RingWriter
from modicum.core.ranks.observed_calls import observed
from modicum.core.ranks.ranks import PeerLost, Ranks

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import modicum.comm

dist.init_process_group("gloo")
modicum.comm.watch(silent_seconds=3, late_seconds=20, record=sys.argv[1])
model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(60):
    if dist.get_rank() == 1 and step == 30:
        os.kill(os.getpid(), signal.SIGSTOP)
    model(torch.ones(8, 8)).sum().backward()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_script_ends_with_four_and_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with open(tmp_path / "said", "w") as said:
        processes = [
            subprocess.Popen(
                [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "record")],
                env=os.environ | place | {"RANK": str(rank)},
                stderr=said,
            )
            for rank in range(2)
        ]
        codes = [process.wait(150) for process in processes]
    printed = (tmp_path / "said").read_text()
    assert codes == [4, -signal.SIGKILL], printed
    named, ended = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    for event in (named, ended):
        assert (event["kind"], event["rank"], event["inside"]) == ("stopped", 1, False)
        assert event["collective"].startswith("all-reduce ")
        assert f"modicum: {event['sentence']}" in printed
    assert (named["ends"], ended["ends"]) == (False, True)


LEAVING = """
import torch, torch.distributed as dist
import modicum.comm

dist.init_process_group("gloo")
modicum.comm.watch()
works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(200)]
"""


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_script_that_leaves_calls_open_ends_in_order(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEAVING)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, str(tmp_path / "script.py")]
    processes = [
        subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}) for rank in range(2)
    ]
    assert [process.wait(150) for process in processes] == [0, 0]


def batch(rank: int, step: int, what: str) -> None:
    if rank != 1 or step != 30:
        return
    if what == "asleep":
        time.sleep(7.0)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "failed":
        raise ValueError("no such row")


def trained(ranks: Ranks, what: str, record: str) -> int:
    with modicum.comm.watch(late_seconds=3.0, slow_share=0.9, record=record):
        model = DistributedDataParallel(torch.nn.Linear(8, 8))
        for step in range(60):
            batch(ranks.rank, step, what)
            model(torch.ones(8, 8)).sum().backward()
        dist.barrier()
    return ranks.rank


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize(("what", "lost"), [("nothing", ()), ("asleep", ()), ("killed", (0, 1, 2))])
def test_ranks_under_ddp(pool: Pool, tmp_path: Path, what: str, lost: tuple[int, ...]) -> None:
    record = tmp_path / "record"
    results = pool.run(trained, what, str(record), ranks=3, lost=lost)
    assert results == [None if rank in lost else rank for rank in range(3)]
    lines = record.read_text().splitlines() if record.exists() else []
    events = [json.loads(line) for line in lines]
    assert [event["kind"] for event in events] == {"asleep": ["late"], "killed": ["dead"]}.get(
        what, []
    )
    for event in events:
        assert (event["rank"], event["inside"], event["ends"]) == (1, False, what == "killed")
        assert event["collective"].startswith("all-reduce ")
        if what == "asleep":
            assert "; it is in test_watching.py:" in event["sentence"]
            assert ", batch, since 3 s" in event["sentence"]


def clipped(ranks: Ranks, record: str) -> int:
    """FSDP2, of which rank 1 sleeps before PyTorch's own norm of the gradients."""
    with modicum.comm.watch(late_seconds=1.0, slow_share=0.9, record=record):
        model = torch.nn.Linear(8, 8)
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks.size,)))
        for step in range(40):
            model(torch.ones(8, 8)).sum().backward()
            batch(ranks.rank, step, "asleep")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model.zero_grad()
        dist.barrier()
    return ranks.rank


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_rank_that_is_late_to_a_norm_of_fsdp2_is_named(pool: Pool, tmp_path: Path) -> None:
    record = tmp_path / "record"
    assert pool.run(clipped, str(record)) == [0, 1]
    (event,) = [json.loads(line) for line in record.read_text().splitlines()]
    assert (event["kind"], event["rank"], event["ends"]) == ("late", 1, False)
    assert event["collective"].startswith("all-reduce ")
    assert event["place"].endswith(", batch")


def failing(ranks: Ranks, record: str) -> None:
    trained(ranks, "failed", record)


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_rank_that_raises_is_the_cause_and_not_those_who_lose_it(
    pool: Pool, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    with pytest.raises(RanksFailed, match="ValueError: no such row"):
        pool.run(failing, str(record), ranks=3, lost=(0, 2))
    (event,) = [json.loads(line) for line in record.read_text().splitlines()]
    assert (event["kind"], event["rank"], event["ends"]) == ("failed", 1, True)
    assert event["note"] == "ValueError: no such row"


def met(ranks: Ranks, seconds: float) -> Any:
    before = sys.excepthook
    try:
        with modicum.comm.watch(late_seconds=seconds + ranks.rank * (seconds > 5)) as watched:
            with watched.marked():
                total = ranks.sum(1.0)
            return watched.alone, total, observed()
    except InputError as error:
        return str(error), observed(), sys.excepthook is before
    finally:
        assert sys.excepthook is before


def waiting(ranks: Ranks) -> str:
    if ranks.rank == 1:
        time.sleep(4.0)
        return ""
    try:
        modicum.comm.watch(coming_seconds=1.0)
    except PeerLost as error:
        return str(error)
    return "nobody is missed"


@pytest.mark.ranks
def test_a_rank_that_does_not_watch_is_named(pool: Pool) -> None:
    for said in pool.run(waiting, ranks=3)[::2]:
        assert said.startswith("rank 1 gives no sign of life since ")
        assert ", while ranks agreed on how they are watched" in said


@pytest.mark.ranks
def test_ranks_agree_on_what_they_watch(pool: Pool) -> None:
    assert pool.run(met, 5.0, ranks=2) == [(False, [2.0], True)] * 2
    for said, watches, restored in pool.run(met, 6.0, ranks=2):
        assert said.startswith("rank 1 watches by {'silent_seconds': 8.0, 'late_seconds': 7.0")
        assert (watches, restored) == (False, True)


def recorded(ranks: Ranks, record: str) -> str:
    with pytest.raises(InputError) as refused:
        modicum.comm.watch(record=record)
    return str(refused.value)


@pytest.mark.ranks
def test_a_record_that_cannot_be_written_is_refused_at_every_rank(
    pool: Pool, tmp_path: Path
) -> None:
    for said in pool.run(recorded, str(tmp_path / "nothing" / "record"), ranks=2):
        assert said.startswith("record: cannot be written: No such file or directory (found: '/")


def test_alone_nothing_is_watched() -> None:
    with modicum.comm.watch() as watched, watched.marked():
        assert watched.alone
        assert not observed()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("late_seconds", float("nan"), "is no positive number"),
        ("late_seconds", "30", "is no number"),
        ("silent_seconds", None, "is no number"),
        ("silent_seconds", 2.9, "is too short: .*3 or more"),
        ("coming_seconds", True, "is no number"),
        ("slow_share", 5, "is no share of an iteration"),
    ],
)
def test_bad_values_are_refused(name: str, value: Any, problem: str) -> None:
    with pytest.raises(InputError, match=f"{name}: {problem}"):
        modicum.comm.watch(**{name: value})


def test_a_call_too_early_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="call watch after"):
        modicum.comm.watch()


def test_errors_of_peers_are_told_from_one_s_own() -> None:
    assert is_of_a_peer(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:3"))
    assert is_of_a_peer(PeerLost("gone"))
    assert not is_of_a_peer(RuntimeError("shapes do not fit"))


def test_an_error_that_was_looked_at_is_read_as_before() -> None:
    for words in ("no such row", "[gloo] Connection closed by peer [127.0.0.1]:3"):
        with pytest.raises(RuntimeError) as found:
            raise RuntimeError(words)
        trace = found.value.__traceback__
        is_of_a_peer(found.value)
        assert found.value.__traceback__ is trace


def watched_at(folder: Path) -> Watch:
    """A watch whose ring lies there, with nobody who looks at it."""
    meeting: Any = SimpleNamespace(ring=RingWriter(folder / "ring", 0), folder=folder)
    return Watch(meeting)


def said_in(folder: Path) -> RingState:
    return RingReader(folder / "ring").state()


def raising(watched: Watch) -> None:
    with suppress(ValueError), watched:
        raise ValueError("no such row")


@pytest.mark.parametrize("end", [Watch.close, raising])
def test_a_process_that_a_rank_has_forked_says_nothing_of_the_rank(
    tmp_path: Path, end: Callable[[Watch], None]
) -> None:
    with watched_at(tmp_path) as watched:
        child = os.fork()
        if not child:
            try:
                end(watched)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert said_in(tmp_path).left == RUNNING
    assert said_in(tmp_path).left == ENDED


def rank_of(_: int, folder: Path, raises: bool) -> None:
    watched_at(folder)
    if raises:
        raise ValueError("no such row")


ENDINGS = pytest.mark.parametrize(
    ("raises", "said"), [(False, (ENDED, "")), (True, (FAILED, "ValueError: no such row"))]
)


@ENDINGS
def test_a_rank_that_multiprocessing_forked_says_how_it_ends(
    tmp_path: Path, raises: bool, said: tuple[int, str]
) -> None:
    rank = get_context("fork").Process(target=rank_of, args=(0, tmp_path, raises))
    rank.start()
    rank.join(60)
    assert rank.exitcode == int(raises)
    state = said_in(tmp_path)
    assert (state.left, state.words) == said


@ENDINGS
def test_a_rank_of_torch_multiprocessing_says_how_it_ends(
    tmp_path: Path, raises: bool, said: tuple[int, str]
) -> None:
    with pytest.raises(ProcessRaisedException) if raises else nullcontext():
        start_processes(rank_of, (tmp_path, raises), nprocs=1, start_method="fork")
    state = said_in(tmp_path)
    assert (state.left, state.words) == said


SPAWNING = """
import multiprocessing, sys
from pathlib import Path
from types import SimpleNamespace


def rank(folder, raises):
    from modicum.comm.watching import Watch
    from modicum.core.ranks.call_ring import RingWriter

    Watch(SimpleNamespace(ring=RingWriter(folder / "ring", 0), folder=folder))
    if raises:
        raise ValueError("no such row")


if __name__ == "__main__":
    arguments = Path(sys.argv[1]), sys.argv[2] == "True"
    process = multiprocessing.get_context("spawn").Process(target=rank, args=arguments)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.expensive
@ENDINGS
def test_a_rank_that_multiprocessing_spawned_says_how_it_ends(
    tmp_path: Path, raises: bool, said: tuple[int, str]
) -> None:
    (tmp_path / "script.py").write_text(SPAWNING)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(raises)]
    assert subprocess.run(command, timeout=150).returncode == int(raises)
    state = said_in(tmp_path)
    assert (state.left, state.words) == said


RANK = """
import sys, time
from pathlib import Path
from modicum.core.ranks.call_ring import RingWriter
ring = RingWriter(Path(sys.argv[1]), int(sys.argv[2]))
ring.beat("script.py:1, run")
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.expensive
def test_agents_of_two_hosts_say_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = {"silent_seconds": 5.0, "late_seconds": 5.0}
    processes, folders = [], [tmp_path / "a", tmp_path / "b"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        command = [sys.executable, "-c", RANK, str(folder / f"rank-{rank}.ring"), str(rank)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline() == b"ready\n"
    record = str(tmp_path / "record.jsonl")
    judging = HostAgent(str(folders[0]), [0], 2, limits, "secret", None, "127.0.0.1", record)
    place = ("127.0.0.1", judging.port)
    sending = HostAgent(str(folders[1]), [1], 2, limits, "secret", place, None, None)
    threads = [threading.Thread(target=agent.run) for agent in (judging, sending)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    processes[1].kill()
    processes[1].wait()
    end = time.monotonic() + 20
    while not (folders[0] / VERDICT).exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert json.loads((folders[0] / VERDICT).read_bytes())["rank"] == 1
    assert processes[0].wait(20) == -signal.SIGKILL  # it does not end itself
    for thread in threads:
        thread.join(20)
    assert not any(folder.exists() for folder in folders)
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("modicum:")]
    assert len(said) == 2
    assert said[0] == said[1]
    assert "is dead since" in said[0]
