"""The agent next to real processes: who judges until when, what travels, and what it outlives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from modicum.comm import watch_agent
from modicum.comm.anomalies import DiagnosisLimits
from modicum.comm.watch_agent import VERDICT, HostAgent
from modicum.core.errors import InputError
from modicum.core.module_process import module_command
from modicum.core.ranks.call_ring import ENDED, FAILED, RingWriter
from modicum.core.ranks.rank_reports import MOST_BYTES, MOST_CALLS, OVER, RankReport, report_line
from modicum.core.ranks.side_channel import AgentLine, Controller

LIMITS = asdict(DiagnosisLimits(silent_seconds=60.0, late_seconds=60.0))
# Ranks that end in order once a line has come, each with so many calls that have ended.
RANKS = """
import sys
from pathlib import Path
from modicum.core.ranks.call_ring import ENDED, RingWriter
from modicum.core.ranks.observed_calls import ObservedCall

import time

folder, count, waits, lives, *ranks = sys.argv[1:]
rings = [RingWriter(Path(folder) / f"rank-{rank}.ring", int(rank)) for rank in ranks]
for ring in rings:
    for number in range(int(count)):
        label = f"layers.{number}.".ljust(64, "x")
        times = (1e5 / 3, 1e5 / 3, 2e5 / 3, 0.1 / 3)
        if waits == "True":
            times = (time.monotonic(),) * 2
        ring.began(ObservedCall(number, "reduce-scatter", "0", (0, 1), label, 1 << 40, *times))
print("ready", flush=True)
sys.stdin.readline()
for ring in rings:
    ring.leave(ENDED)
time.sleep(float(lives))
"""
Begin = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts a process that is these ranks of the host with this folder."""
    begun: list[subprocess.Popen[bytes]] = []

    def ranks(
        folder: Path, *which: int, calls: int = 0, waits: bool = False, lives: float = 0.0
    ) -> subprocess.Popen[bytes]:
        folder.mkdir(exist_ok=True)
        words = [str(folder), str(calls), str(waits), str(lives), *map(str, which)]
        begun.append(
            subprocess.Popen(
                [sys.executable, "-c", RANKS, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert begun[-1].stdout is not None
        assert begun[-1].stdout.readline() == b"ready\n"
        return begun[-1]

    yield ranks
    for process in begun:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def at_work(agent: HostAgent) -> threading.Thread:
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> bool:
    thread.join(20)
    return not thread.is_alive()


def failed(rank: int) -> RankReport:
    return RankReport(
        rank=rank, host="b", process="running", process_seconds=0.0, beat_seconds=0.1, starved=0.0,
        left=FAILED, words="ValueError: no such row", marked=False, place="", entered={},
        members={}, open=(), done=(),
    )  # fmt: skip


def test_who_judges_stays_while_ranks_of_other_hosts_work(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_agent, "FAREWELL_SECONDS", 0.0)
    here = begin(tmp_path / "a", 0)
    judging = HostAgent(str(tmp_path / "a"), [0], 2, LIMITS, "secret", None, "127.0.0.1", None)
    line = AgentLine("127.0.0.1", judging.port, "secret", [1])
    thread, met = at_work(judging), line.heard
    until(lambda: line.heard > met)
    assert not line.over
    here.communicate(b"\n")
    until(lambda: line.over)
    line.send([failed(1)])
    events: Any = []
    until(lambda: events.extend(line.events()) or events)
    assert [(event["kind"], event["rank"], event["ends"]) for event in events] == [
        ("failed", 1, True)
    ]
    line.close()
    assert joined(thread)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("over", [False, True])
def test_a_controller_that_is_silent_surprises_nobody_once_it_has_said_so(
    begin: Begin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    over: bool,
) -> None:
    monkeypatch.setattr(watch_agent, "GRACE_SECONDS", 0.0)
    rank, controller = begin(tmp_path / "b", 1), Controller("127.0.0.1", "secret", 2)
    limits, place = LIMITS | {"silent_seconds": 0.5}, ("127.0.0.1", controller.port)
    sending = HostAgent(str(tmp_path / "b"), [1], 2, limits, "secret", place, None, None)
    until(lambda: controller.agents == 1)
    if over:
        controller.tell(OVER)
    thread = at_work(sending)
    if over:
        came: Any = []  # one with each look, until long after it would have ended it
        until(lambda: came.extend(controller.reports()) or len(came) >= 15)
        rank.communicate(b"\n")
    assert rank.wait(20) == (0 if over else -signal.SIGKILL)
    assert joined(thread)
    controller.close()
    said = "rank 0 (host 127.0.0.1) gives no sign of life since"
    assert (said in capfd.readouterr().err) is not over


def test_the_longest_reports_of_many_ranks_arrive(begin: Begin, tmp_path: Path) -> None:
    every, controller = list(range(8)), Controller("127.0.0.1", "secret", 8)
    ranks, place = begin(tmp_path / "b", *every, calls=MOST_CALLS), ("127.0.0.1", controller.port)
    sending = HostAgent(str(tmp_path / "b"), every, 8, LIMITS, "secret", place, None, None)
    thread = at_work(sending)
    found: dict[int, RankReport] = {}

    def all_came() -> bool:
        for report in controller.reports():
            found.setdefault(report.rank, report)
        return len(found) == 8 or bool(controller.refused)

    until(all_came)
    assert controller.refused == []
    assert [len(found[rank].done) for rank in every] == [MOST_CALLS] * 8
    assert {len(call.label) for one in found.values() for call in one.done} == {64}
    assert len(report_line(list(found.values()))) > MOST_BYTES  # on one line they would not
    ranks.communicate(b"\n")
    assert joined(thread)
    controller.close()


def test_a_verdict_that_cannot_be_written_ends_the_ranks_all_the_same(
    begin: Begin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def no_room(path: Path, value: object) -> None:
        raise InputError("no space left", file=path)

    monkeypatch.setattr(watch_agent, "write_json", no_room)
    monkeypatch.setattr(watch_agent, "GRACE_SECONDS", 0.0)
    lost, left = (begin(tmp_path / "a", rank) for rank in range(2))
    agent = HostAgent(str(tmp_path / "a"), [0, 1], 2, LIMITS, "", None, None, None)
    thread = at_work(agent)
    lost.kill()
    assert left.wait(20) == -signal.SIGKILL
    assert joined(thread)
    assert not (tmp_path / "a").exists()
    assert "is dead since" in capfd.readouterr().err


@pytest.mark.parametrize("paused", [True, False])
def test_an_agent_that_was_stopped_itself_says_so_to_the_judge(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    rank = begin(tmp_path / "a", 0)
    agent = HostAgent(str(tmp_path / "a"), [0], 1, LIMITS, "", None, None, None)
    assert agent._judge is not None
    told: list[float] = []
    monkeypatch.setattr(agent._judge, "resumed", told.append)
    monkeypatch.setattr(watch_agent, "PAUSED_SECONDS", 0.01 if paused else 60.0)
    thread = at_work(agent)
    if paused:
        until(lambda: told)
    rank.communicate(b"\n")
    assert joined(thread)
    assert bool(told) is paused


def test_the_agent_outlives_signals_to_all_processes_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    ring = RingWriter(tmp_path / "a" / "rank-0.ring", 0)
    task = {"folder": str(tmp_path / "a"), "ranks": [0], "size": 1, "limits": LIMITS, "secret": ""}
    task |= dict.fromkeys(("controller", "listen", "record", "run"))
    with subprocess.Popen(
        module_command("modicum.comm.watch_agent"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.close()
        assert json.loads(process.stdout.readline()) == {"port": 0}
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)
        ring.leave(ENDED)
        assert process.wait(20) == 0
    assert not (tmp_path / "a").exists()


def test_a_rank_of_another_host_that_ended_is_named_once_it_is_dead(
    begin: Begin, tmp_path: Path
) -> None:
    """It lives for a moment after it has said that it ends, and others wait for it."""
    here = begin(tmp_path / "a", 0, calls=1, waits=True)
    there = begin(tmp_path / "b", 1, lives=1.0)
    port = ("127.0.0.1", 0)
    judging = HostAgent(str(tmp_path / "a"), [0], 2, LIMITS, "secret", None, port[0], None)
    at = (port[0], judging.port)
    sending = HostAgent(str(tmp_path / "b"), [1], 2, LIMITS, "secret", at, None, None)
    threads = [at_work(judging), at_work(sending)]
    there.communicate(b"\n")
    until(lambda: (tmp_path / "a" / VERDICT).exists())
    event = json.loads((tmp_path / "a" / VERDICT).read_text())
    assert (event["kind"], event["rank"]) == ("left", 1)
    here.kill()
    assert all(map(joined, threads))


def test_who_reads_no_sentence_holds_up_no_verdict(begin: Begin, tmp_path: Path) -> None:
    lost, left = (begin(tmp_path / "a", rank) for rank in range(2))
    task = {"folder": str(tmp_path / "a"), "ranks": [0, 1], "size": 2, "limits": LIMITS}
    task |= {"secret": "", "record": str(tmp_path / "record")}
    task |= dict.fromkeys(("controller", "listen", "run"))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(512))
    os.set_blocking(writing, True)
    with subprocess.Popen(
        module_command("modicum.comm.watch_agent"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writing,
        start_new_session=True,
    ) as process:
        os.close(writing)
        assert process.stdin is not None
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.close()
        lost.kill()
        try:
            until((tmp_path / "a" / VERDICT).exists)
        finally:
            os.close(reading)
        left.communicate(b"\n")
        assert process.wait(20) == 0
    assert json.loads((tmp_path / "record").read_bytes())["kind"] == "dead"
