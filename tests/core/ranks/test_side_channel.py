"""Rings, reports and the controller: what is written is what is read, and nothing else is taken."""

from __future__ import annotations

import errno
import hmac
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.core.ranks.call_ring import BEREFT, FAILED, RingReader, RingWriter
from modicum.core.ranks.observed_calls import ObservedCall
from modicum.core.ranks.rank_probe import RankProbe, process_state, seconds_without_processor
from modicum.core.ranks.rank_reports import (
    MOST_BYTES,
    MOST_GROUPS,
    OVER,
    parse_reports,
    report_line,
)
from modicum.core.ranks.side_channel import MOST_WAITING_BYTES, AgentLine, Controller, listening

EVENT = {"sentence": "rank 1 is dead", "ends": True}


def call(sequence: int, group: str = "0", ended: float = math.nan) -> ObservedCall:
    now = time.monotonic()
    return ObservedCall(
        sequence, "all-reduce", group, (0, 1), f"layers.{sequence}", 8, now, now, ended
    )


def test_a_ring_gives_back_what_was_written(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "ring", 1, capacity=4)
    reader = RingReader(tmp_path / "ring")
    calls = [call(n, group="ab"[n % 2]) for n in range(6)]
    for one in calls:
        writer.began(one)
    calls[5].ended, calls[5].waited, calls[0].ended = calls[5].begun + 2, 1.5, 0.0
    writer.changed(calls[5])
    writer.changed(calls[0])  # which was written over
    writer.beat("packing.py:88, batch")
    writer.mark(marked=True)
    writer.leave(FAILED, "ValueError: no")
    writer.leave(BEREFT, "later")
    state = reader.state()
    assert (state.rank, state.pid, state.written) == (1, os.getpid(), 6)
    assert (state.left, state.words, state.marked) == (FAILED, "ValueError: no", True)
    assert state.place == "packing.py:88, batch"
    assert dict(state.groups) == {"a": (0, 1), "b": (0, 1)}
    assert list(reader.since(0)) == [2, 3, 4, 5]
    found = [reader.call(number) for number in range(6)]
    assert found[:2] == [None, None]
    assert str([one.call for one in found[2:] if one]) == str(calls[2:])  # NaN differs from itself


def test_a_file_that_is_no_ring_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ring").write_bytes(b"x" * 40_000)
    with pytest.raises(InputError, match="is no ring of calls"):
        RingReader(tmp_path / "ring")


def test_a_ring_without_room_is_an_error_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later the first write into it would be the end of the process."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="No space left on device"):
        RingWriter(tmp_path / "ring", 0)


def test_a_probe_sees_calls_once_and_the_process(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from modicum.core.ranks.call_ring import RingWriter\n"
        "RingWriter(Path(sys.argv[1]), 3)\nassert 'torch' not in sys.modules\n"
        "print('ready', flush=True)\ntime.sleep(100)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "ring")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        probe = RankProbe(tmp_path / "ring")
        assert (probe.rank, probe.look().process) == (3, "running")
        states = []
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
            os.kill(process.pid, number)
            time.sleep(0.2)
            states.append(probe.look().process)
        assert states == ["stopped", "running", "dead"]
        assert probe.ended
        process.wait()
        assert process_state(process.pid) == "dead"


def test_a_process_that_a_debugger_holds_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "7 (python) t 1 7 7")
    assert process_state(os.getpid()) == "running"


def test_a_host_s_name_of_odd_bytes_is_one_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node\udcff\x1b7")
    _, report = reports(tmp_path)
    assert parse_reports(report_line([report]), 2)[0].host == "node  7"


@pytest.mark.skipif(not seconds_without_processor(os.getpid()), reason="nobody counts here")
def test_a_probe_sees_who_has_no_processor(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "from modicum.core.ranks.call_ring import RingWriter\n"
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "RingWriter(Path(sys.argv[1]), 3)\nprint('ready', flush=True)\nwhile True: pass\n"
    )
    commands = [[sys.executable, "-c", program, str(tmp_path / name)] for name in ("one", "other")]
    busy = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        for process in busy:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        probes = [RankProbe(tmp_path / name) for name in ("one", "other")]
        time.sleep(1.0)
        shares = [probe.look().starved for probe in probes]
        assert 0.8 < sum(shares) <= 2.0  # one of two runs at a time, or neither
    finally:
        for process in busy:
            process.kill()
            process.communicate()


def test_a_share_above_one_is_refused(tmp_path: Path) -> None:
    report = replace(reports(tmp_path)[1], starved=1.5)
    with pytest.raises(ValueError, match="no share"):
        parse_reports(report_line([report]), 2)


def reports(tmp_path: Path) -> Any:
    writer = RingWriter(tmp_path / "ring", 1)
    probe = RankProbe(tmp_path / "ring")
    open_one, done = call(1), call(0)
    writer.began(done)
    writer.began(open_one)
    done.ended = done.begun + 0.5
    writer.changed(done)
    return probe, probe.look()


def test_reports_travel_as_they_are(tmp_path: Path) -> None:
    probe, report = reports(tmp_path)
    assert [one.seconds for one in report.done] == [pytest.approx(0.5)]
    assert [one.label for one in report.open] == ["layers.1"]
    assert report.entered == {"0": 2}
    assert parse_reports(report_line([report]), 2) == [report]
    assert probe.look().done == ()


def test_a_message_is_open_from_when_it_is_waited_for(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "ring", 1)
    probe = RankProbe(tmp_path / "ring")
    now = time.monotonic()
    one = ObservedCall(4, "recv", "0 0>1", (0, 1), "", 12, now - 9, now - 9)
    writer.began(one)
    assert probe.look().entered == {}  # it is written later
    writer.beat("script.py:1, run")
    first = probe.look()
    assert (first.open, first.done, first.entered) == ((), (), {"0 0>1": 5})
    assert [(each.sequence, each.bytes) for each in first.unawaited] == [(4, 12)]
    assert parse_reports(report_line([first]), 2) == [first]
    one.awaited = now - 2
    writer.beat("script.py:1, run")
    (waits,) = probe.look().open
    assert (waits.kind, waits.sequence, waits.bytes) == ("recv", 4, 12)
    assert waits.seconds == pytest.approx(2.0, abs=1.0)
    one.waited, one.ended = 2.0, now
    writer.changed(one)
    (done,) = probe.look().done
    assert (done.seconds, done.waited) == (pytest.approx(9.0), 2.0)
    assert probe.look().done == probe.look().open == ()


def test_of_too_many_groups_links_are_left_out(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "ring", 1)
    writer.began(call(0))
    for peer in range(100):
        now = time.monotonic()
        writer.began(ObservedCall(0, "send", f"0 1>{peer}", (1, peer), "", 8, now, now, now))
    writer.beat("")
    report = RankProbe(tmp_path / "ring").look()
    assert len(report.members) == len(report.entered) == MOST_GROUPS
    assert report.entered["0"] == 1
    assert report.members["0"] == (0, 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(line=st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_nothing_but_reports_is_taken(line: bytes) -> None:
    try:
        found = parse_reports(line, 4)
    except ValueError:
        return
    assert found == []


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    _, report = reports(tmp_path_factory.mktemp("valid"))
    value: dict[str, Any] = json.loads(report_line([report]))[0]
    return value


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_spoilt_report_is_refused_or_of_the_same_types(
    valid: dict[str, Any], data: st.DataObject
) -> None:
    spoilt = json.loads(json.dumps(valid))
    at = data.draw(st.sampled_from(sorted(spoilt)))
    place = data.draw(st.sampled_from([spoilt, spoilt["done"][0], spoilt["open"][0]]))
    at = at if at in place else data.draw(st.sampled_from(sorted(place)))
    place[at] = data.draw(JSON)
    try:
        (found,) = parse_reports(json.dumps([spoilt]).encode(), 2)
    except ValueError:
        return
    assert 0 <= found.rank < 2
    assert all(
        math.isfinite(one.seconds) and one.seconds >= -1 for one in (*found.done, *found.open)
    )
    assert all(set(members) <= {0, 1} for members in found.members.values())
    assert parse_reports(report_line([found]), 2) == [found]


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b"[]" + b" " * MOST_BYTES, b'[{"rank": NaN}]', b"[{}, {}, {}]"]
)
def test_what_is_too_long_too_deep_or_no_number_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"nested|more than|no number|no list|no RankReport"):
        parse_reports(line, 2)


def until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_agents_reach_the_controller_and_hear_of_events(tmp_path: Path) -> None:
    _, report = reports(tmp_path)
    controller = Controller("127.0.0.1", "secret", 3)
    lines = [AgentLine("127.0.0.1", controller.port, "secret", ranks) for ranks in ([0, 2], [1])]
    lines[1].send([report])
    until(lambda: controller.agents == 2)
    found: list[Any] = []
    until(lambda: found.extend(controller.reports()) or found)
    assert found == [report]
    controller.tell(EVENT)
    for line in lines:
        heard: list[Any] = []
        until(lambda line=line, heard=heard: heard.extend(line.events()) or heard)
        assert heard == [EVENT]
    lines[0].send([report])  # not its own
    until(lambda: not lines[0].open and controller.agents == 1)
    assert controller.refused == ["a rank of another host"]
    controller.close()
    until(lambda: not lines[1].open)
    for line in lines:
        line.close()


def test_that_the_controller_s_work_is_over_is_no_event() -> None:
    controller = Controller("127.0.0.1", "secret", 2)
    line = AgentLine("127.0.0.1", controller.port, "secret", [1])
    until(lambda: controller.agents == 1)
    assert not line.over
    controller.tell(OVER)
    controller.tell(EVENT)
    heard: list[Any] = []
    until(lambda: heard.extend(line.events()) or heard)
    assert heard == [EVENT]
    assert line.over
    assert line.open
    line.close()
    controller.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_without_an_address_every_one_is_listened_at(host: str) -> None:
    with listening("") as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((host, port), timeout=20) as there:
            here, _ = listener.accept()
            with here:
                here.sendall(b"met")
                assert there.recv(3) == b"met"


def test_an_address_of_another_machine_is_not_listened_at() -> None:
    with pytest.raises(OSError, match=r"assign|available|bind"):
        listening("192.0.2.1")


def line_of(there: socket.socket) -> bytes:
    """A line of a socket without its end, and nothing after it."""
    line = b""
    while not line.endswith(b"\n") and (more := there.recv(1)):
        line += more
    return line.removesuffix(b"\n")


def proof(who: bytes, *challenges: bytes) -> bytes:
    """What an end says that knows the secret."""
    return hmac.new(b"secret", b" ".join((who, *challenges)), "sha256").hexdigest().encode()


def test_an_agent_does_not_wait_for_a_controller_that_does_not_read(tmp_path: Path) -> None:
    """As after a cable was pulled: the agent must go on, to say that it hears nothing."""
    _, report = reports(tmp_path)
    line = report_line([report])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def meet() -> None:
            taken.append(listener.accept()[0])
            taken[0].sendall(b"challenge\n")
            own, _, _ = line_of(taken[0]).partition(b" ")
            taken[0].sendall(proof(b"controller", b"challenge", own) + b"\n")

        meeting = threading.Thread(target=meet)
        meeting.start()
        agent = AgentLine("127.0.0.1", listener.getsockname()[1], "secret", [1])
        meeting.join()
        count = 2 * MOST_WAITING_BYTES // len(line) + 20_000
        for _ in range(count):
            agent.send([report])
        assert agent.open
        with taken[0] as reader:
            reader.settimeout(1)
            read = bytearray()
            while len(read) <= MOST_WAITING_BYTES:
                read += reader.recv(1 << 20)
                agent.send([report])  # what waits is sent with what follows
            agent.close()
            while more := reader.recv(1 << 20):
                read += more
        found = bytes(read).splitlines(keepends=True)[1:]
        assert {each for each in found if each.endswith(b"\n")} == {line}
        assert len(found) < count


def test_the_controller_does_not_wait_for_an_agent_that_does_not_read(tmp_path: Path) -> None:
    controller = Controller("127.0.0.1", "secret", 2)
    with socket.create_connection(("127.0.0.1", controller.port)) as deaf:
        challenge = line_of(deaf)
        deaf.sendall(b"own " + proof(b"agent", challenge, b"own") + b"\n[0]\n")
        line = AgentLine("127.0.0.1", controller.port, "secret", [1])
        until(lambda: controller.agents == 2)
        event, count = {"sentence": "x" * 1000, "ends": False}, 8000
        heard: list[Any] = []
        for _ in range(count):
            controller.tell(event)
            heard += line.events()
        until(
            lambda: (controller.tell({}), heard.extend(line.events()), len(heard) > count // 2)[2]
        )
        assert set(map(str, heard)) == {str(event)}
        line.close()
    controller.close()


@pytest.mark.parametrize("said", [b"wrong\n[0]\n", b"\n", b"x" * (2 * MOST_BYTES)])
def test_who_does_not_know_the_secret_is_refused(said: bytes) -> None:
    controller = Controller("127.0.0.1", "secret", 2)
    with socket.create_connection(("127.0.0.1", controller.port)) as stranger:
        stranger.settimeout(20)
        stranger.recv(100)
        try:
            stranger.sendall(said)
            left = stranger.recv(100)
        except OSError:
            left = b""
        assert left == b""
    assert controller.agents == 0
    assert len(controller.refused) == 1
    controller.close()
