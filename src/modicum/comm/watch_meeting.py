"""How ranks come to be watched: a ring each, an agent on every host, one controller.

All by the store in which they found each other, so no collective is issued.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch.distributed as dist

from modicum.comm.anomalies import DiagnosisLimits
from modicum.core.errors import InputError
from modicum.core.module_process import module_command
from modicum.core.ranks.call_ring import BEREFT, RING_BYTES, RingWriter
from modicum.core.ranks.ranks import PeerLost
from modicum.core.ranks.roll_call import RollCall
from modicum.core.ranks.side_channel import listening
from modicum.core.torch_private import default_store


class WatchMeeting:
    """All ranks of the default process group make one at about the same time.

    Attributes:
        folder, ring: where this host's rings are, and this rank's.
        begun: whether this process has started the agent, which removes the folder.

    Raises:
        InputError: ranks differ, rank 0's record cannot be written, or there is no room for rings.
        PeerLost: a rank does not come, or is gone.
    """

    begun = False

    def __init__(
        self, limits: DiagnosisLimits, files: Mapping[str, str], coming_seconds: float
    ) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        with RollCall("how they are watched", rank, size, coming_seconds=coming_seconds) as call:
            record = "" if rank or "run" in files else files.get("record", "")
            mine = [_host(), asdict(limits), record, _wrong_with(record)]
            others = call.gather("host and limits", mine)
            *_, record, wrong = others[0]
            if wrong:
                raise InputError(f"cannot be written: {wrong}", field="record", value=record)
            for other, (_, theirs, *_) in enumerate(others):
                if theirs != others[0][1]:
                    raise InputError(
                        f"rank {other} watches by {theirs}, and rank 0 by {others[0][1]}; give all "
                        "ranks the same values"
                    )
            self._meet(call, [host for host, *_ in others], limits, {} if rank else files)

    def _meet(
        self,
        call: RollCall,
        hosts: Sequence[str],
        limits: DiagnosisLimits,
        files: Mapping[str, str],
    ) -> None:
        rank = dist.get_rank()
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        folder: str | None = None
        if rank == here[0]:
            place = _shared_memory(len(here))
            with _room_in(place or _temporary()):
                folder = tempfile.mkdtemp(prefix="modicum-watch-", dir=place)
        try:
            if folder is not None:
                call.tell("folder", folder)
            self.folder = Path(call.ask("folder", here[0])[0])
            with _room_in(self.folder.parent):
                self.ring = RingWriter(self.folder / f"rank-{rank}.ring", rank)
            call.tell("ring")
            try:
                if folder is not None:
                    self._start_agent(call, here, limits, files)
                    call.tell("agent")
                # Who is not watched yet could stop unseen, so nobody begins before all are.
                call.ask("agent", *sorted({hosts.index(host) for host in hosts}))
            except PeerLost:
                self.ring.leave(BEREFT)  # or the agent says that this rank is dead
                raise
        except BaseException:
            if folder is not None and not self.begun:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _start_agent(
        self, call: RollCall, here: list[int], limits: DiagnosisLimits, files: Mapping[str, str]
    ) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        call.ask("ring", *here)
        task = {
            "folder": str(self.folder),
            "ranks": here,
            "size": size,
            "limits": asdict(limits),
            "secret": "",
            "controller": None,
            "listen": None,
            "record": None,
            "run": None,
        }
        task |= dict(files)
        if len(here) < size:
            self._among_hosts(call, task, rank)
        else:
            self._begin(task)

    def _among_hosts(self, call: RollCall, task: dict[str, Any], rank: int) -> None:
        if rank == 0:
            name, secret = meeting_name(), secrets.token_hex(32)
            port = self._begin(task | {"listen": address_of(name), "secret": secret})
            call.tell("controller", [name, port, secret])
            return
        [(name, port, secret)] = call.ask("controller", 0)
        self._begin(task | {"controller": [name, port], "secret": secret})

    def _begin(self, task: dict[str, Any]) -> int:
        """Start the agent; the port at which it listens."""
        process = subprocess.Popen(
            module_command("modicum.comm.watch_agent"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.begun = True
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.close()
        said = process.stdout.readline()
        process.stdout.close()
        # It outlives this process, and is no child to wait for.
        process.returncode = 0
        if not said:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise InputError("the process that watches the ranks of this host did not start")
        port: int = json.loads(said)["port"]
        return port


def meeting_name() -> str:
    """The name by which other hosts reach rank 0's, where this is called: that by which they met.

    The store knows it also where nothing sets MASTER_ADDR, as with `init_method="tcp://..."`.
    """
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return store.host
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def address_of(name: str) -> str:
    """Where to listen, so that other hosts reach this one by the name by which they met.

    Empty, every address, where that name means something else here than there: Debian gives a host
    the address 127.0.1.1 for its own name, and behind a router it has another than others know.

    Raises:
        InputError: the name has no address.

    >>> address_of("127.0.0.1")
    '127.0.0.1'
    """
    try:
        found = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InputError(f"has no address: {error}", field="MASTER_ADDR", value=name) from None
    if ip_address(found).is_loopback and name not in ("localhost", found):
        return ""
    try:
        listening(found).close()
    except OSError:
        return ""
    return found


def _shared_memory(rings: int) -> Path | None:
    """The folder that is memory, where there is one with room for so many rings."""
    shared = Path("/dev/shm")
    if not (shared.is_dir() and os.access(shared, os.W_OK)):
        return None
    return shared if shutil.disk_usage(shared).free > 2 * rings * RING_BYTES else None


@contextmanager
def _room_in(folder: Path) -> Iterator[None]:
    """Say that a folder has no room for rings, or that nothing can be written there."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"the ranks' calls cannot be written here: {error.strerror}; set TMPDIR to a folder "
            "with room, or watch nobody (`watchdog: null` in a recipe)",
            file=folder,
        ) from error


def _temporary() -> Path:
    return Path(tempfile.tempdir or os.environ.get("TMPDIR", "/tmp"))


def _wrong_with(record: str) -> str:
    """Why a file cannot be added to, if one is named; it is not made."""
    there = os.path.exists(record)
    try:
        if record:
            open(record, "ab").close()
    except OSError as error:
        return error.strerror or str(error)
    if record and not there:
        os.unlink(record)
    return ""


def _host() -> str:
    """What tells this host from others, also of the same name.

    Containers of one machine are hosts of their own: one does not see the other's processes.
    """
    found = [socket.gethostname()]
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)
