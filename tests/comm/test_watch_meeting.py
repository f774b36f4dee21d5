"""Where a host's rings lie, and at which address its agent listens."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from modicum.comm import watch_meeting
from modicum.comm.anomalies import DiagnosisLimits
from modicum.comm.watch_meeting import (
    WatchMeeting,
    _shared_memory,
    _wrong_with,
    address_of,
    meeting_name,
)
from modicum.core.errors import InputError
from modicum.core.ranks.call_ring import RING_BYTES


def named(address: str) -> Callable[..., Any]:
    """What finds this address for every name."""
    return lambda name, port, **_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]


def test_an_address_of_this_machine_stays() -> None:
    assert address_of("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "address", "listens"),
    [
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node0", "127.0.1.1", ""),  # other hosts reach it elsewhere
        ("node0", "::1", ""),
        ("node0", "192.0.2.1", ""),  # no machine has it
        ("192.0.2.1", "192.0.2.1", ""),
    ],
)
def test_a_name_that_means_something_else_here_is_listened_for_everywhere(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str, listens: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", named(address))
    assert address_of(name) == listens


def test_a_name_of_an_address_of_this_machine_is_listened_for_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", named("192.0.2.1"))
    monkeypatch.setattr(watch_meeting, "listening", lambda host: socket.socket())
    assert address_of("node0") == "192.0.2.1"


def test_a_name_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(InputError, match=r"MASTER_ADDR: has no address: .*not known"):
        address_of("node0")


def test_the_store_knows_by_which_name_ranks_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `init_method="tcp://..."`, which neither sets nor reads MASTER_ADDR."""
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores: list[dist.Store] = [dist.PrefixStore("group", dist.PrefixStore("all", tcp)), tcp]
    monkeypatch.setattr(watch_meeting, "default_store", lambda: stores[0])
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    assert meeting_name() == "127.0.0.1"
    stores[0] = dist.PrefixStore("group", dist.HashStore())
    assert meeting_name() == "192.0.2.1"
    monkeypatch.delenv("MASTER_ADDR")
    assert meeting_name() == "127.0.0.1"  # for lack of another


def with_room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no such memory here")
def test_rings_lie_in_memory_that_has_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, 2 * 8 * RING_BYTES + 1)
    assert _shared_memory(8) == Path("/dev/shm")
    assert _shared_memory(9) is None
    with_room(monkeypatch, 0)
    assert _shared_memory(1) is None


class Call:
    """The roll call of one rank, which is interrupted while it says one thing."""

    def __init__(self, breaks: str, said: list[Path]) -> None:
        self._breaks, self._said = breaks, said

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def gather(self, _: str, value: Any) -> list[Any]:
        return [value]

    def tell(self, what: str, value: Any = None) -> None:
        if what == "folder":
            self._said.append(Path(value))
        if what == self._breaks:
            raise KeyboardInterrupt

    def ask(self, what: str, *ranks: int) -> list[Any]:
        return self._said if what == "folder" else [None]


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("breaks", ["folder", "ring", "the ring's file", "the agent's process"])
def test_what_breaks_before_the_agent_has_begun_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, breaks: str
) -> None:
    said: list[Path] = []
    monkeypatch.setattr(watch_meeting, "RollCall", lambda *_, **__: Call(breaks, said))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with_room(monkeypatch, 0)
    if breaks == "the ring's file":
        monkeypatch.setattr(os, "posix_fallocate", no_room, raising=False)
    if breaks == "the agent's process":
        monkeypatch.setattr(subprocess, "Popen", no_room)
    full = breaks == "the ring's file"
    with pytest.raises(InputError if full else (KeyboardInterrupt, OSError)) as found:
        WatchMeeting(DiagnosisLimits(), {}, 1.0)
    assert [folder.parent for folder in said] == [tmp_path]
    assert list(tmp_path.iterdir()) == []
    if full:
        assert str(found.value).startswith(f"{tmp_path}: the ranks' calls cannot be written here")
        assert "No space left on device; set TMPDIR to a folder with room" in str(found.value)


def test_whether_a_record_can_be_added_to_is_seen_without_one(tmp_path: Path) -> None:
    record = tmp_path / "record"
    assert _wrong_with(str(record)) == _wrong_with("") == ""
    assert not record.exists()
    record.write_text("a line\n")
    assert _wrong_with(str(record)) == ""
    assert record.read_text() == "a line\n"
    assert _wrong_with(str(tmp_path)) == "Is a directory"


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="of Linux")
def test_containers_of_one_machine_are_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = watch_meeting._host()
    assert os.readlink("/proc/self/ns/pid") in here
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
    assert watch_meeting._host() != here
