"""A rank's process as its supervisor sees it: what it printed, how it ended, whether it works."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from modicum.core.errors import DoesNotFit, FoundWanting, InputError, Interrupted, Restart
from modicum.parallel.rank_environment import LOST

TAIL = 200  # lines that are kept of what a rank prints
# Processes that use no processor and wait for no disk for so many seconds wait for somebody; where
# the system does not tell, they get more time.
_IDLE = 5.0
_PATIENCE = 60.0
_BUSY = 0.05  # seconds of processor time in that time that are something


class Weight(IntEnum):
    """How much a rank's end explains those of the others; the smaller, the more."""

    KILLED = 0
    TOLD = 1
    AGAIN = 2
    BUG = 3
    ABORTED = 4
    ASKED = 5
    NOTHING = 6


_BY_CODE = {
    InputError.exit_code: Weight.TOLD,
    DoesNotFit.exit_code: Weight.TOLD,
    FoundWanting.exit_code: Weight.TOLD,
    Restart.exit_code: Weight.AGAIN,
    Interrupted.exit_code: Weight.ASKED,
    -signal.SIGTERM: Weight.ASKED,
    -signal.SIGABRT: Weight.ABORTED,  # what C++ does when a peer is gone
    LOST: Weight.NOTHING,
}


class Tail:
    """The last lines of a stream.

    >>> tail = Tail()
    >>> tail.feed(b"one\\ntw")
    >>> tail.feed(b"o")
    >>> tail.lines()
    ['one', 'two']
    """

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take what was read, wherever it was split."""
        *whole, rest = (self._rest + data).split(b"\n")
        self._lines.extend(whole)
        self._rest = rest[-4096:]

    def lines(self) -> list[str]:
        """The lines, without their ends."""
        last = [self._rest] if self._rest else []
        return [line.decode(errors="replace").rstrip() for line in (*self._lines, *last)]


@dataclass
class RankProcess:
    """A rank's process, what it printed, and what was done to it."""

    number: int
    process: subprocess.Popen[bytes]
    tail: Tail = field(default_factory=Tail)
    asked: bool = False
    killed: bool = False

    @property
    def code(self) -> int | None:
        """What it ended with, as last seen; below zero the signal that killed it."""
        return self.process.returncode

    @property
    def weight(self) -> Weight:
        """How much its end explains; of a rank that ended well or that we killed, nothing."""
        code = self.code
        if not code or (self.killed and code == -signal.SIGKILL):
            return Weight.NOTHING
        return _BY_CODE.get(code, Weight.KILLED if code < 0 else Weight.BUG)

    @property
    def how(self) -> str:
        """How it ended badly, for people."""
        code = self.code or 0
        if code >= 0:
            return f"rank {self.number} failed with exit code {code}"
        known = -code in signal.valid_signals() and -code < signal.SIGRTMIN
        name = signal.Signals(-code).name if known else f"signal {-code}"
        return f"rank {self.number} was killed by {name}"

    def printed(self) -> list[str]:
        """What it printed last, each line under its name where it does not name itself."""
        name = f"rank {self.number}: "
        lines = self.tail.lines()
        return [line if line.startswith(f"modicum: {name}") else name + line for line in lines]

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        if self.process.poll() is None:
            self.asked, self.killed = True, self.killed or number == signal.SIGKILL
            self.process.send_signal(number)


class Activity:
    """Whether processes do anything: compute, or wait for a disk."""

    def __init__(self) -> None:
        self._since, self._used = time.monotonic(), 0.0
        self._limit = _IDLE if Path("/proc/self/stat").exists() else _PATIENCE

    def idle(self, processes: Sequence[int]) -> bool:
        """Whether they have done nothing for so long that they wait for somebody who is gone."""
        used, waits = 0.0, False
        for process in processes:
            for stat in Path(f"/proc/{process}/task").glob("*/stat"):
                with suppress(OSError):  # the thread has ended
                    # The state of a thread: psutil has those of processes.
                    fields = stat.read_text(errors="replace").rpartition(")")[2].split()
                    used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                    waits = waits or fields[0] == "D"
        if waits or abs(used - self._used) >= _BUSY:
            self._since, self._used = time.monotonic(), used
        return time.monotonic() - self._since > self._limit
