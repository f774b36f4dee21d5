"""The ranks of a run on this machine: started, watched and ended by a process without torch.

Rank 0 has the terminal; what the others print is kept, and shown of the rank that failed by itself.
When a rank ends badly the others are ended within seconds, and the cause is reported.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

from modicum.core.cores import usable_cores
from modicum.core.errors import InputError, Interrupted
from modicum.parallel.rank_environment import STARTS, SUPERVISOR
from modicum.parallel.rank_process import Activity, RankProcess, Weight

RESTARTS = 8  # how often all ranks are started again before that is given up
_TICK = 0.05  # seconds between two looks
# Seconds after a rank's end in which the others may end by themselves: of a rank that is killed the
# connections close before its end can be seen, and those who lose them may be quicker.
_SETTLE = 1.0
_GRACE = 3.0  # seconds from a failure to the end of those that were asked to end


class Supervisor:
    """Starts ranks of a command, watches them, and ends all when one of them ends badly.

    Args:
        command: what every rank runs; its place stands in the environment, as torchrun has it.
        size: how many ranks.
        environment: what else stands there; by default this process's.
        say: takes a sentence for the user; by default printed on standard error.

    >>> Supervisor(["sh", "-c", 'test "$WORLD_SIZE" = 2'], 2).run()
    0
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        *,
        environment: Mapping[str, str] = os.environ,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._command, self._size, self._environment = list(command), size, dict(environment)
        self._say = say or (lambda text: print(f"modicum: {text}", file=sys.stderr, flush=True))
        self._ranks: list[RankProcess] = []
        self._requests: list[int] = []

    def run(self) -> int:
        """Run all ranks to their end; ranks that ask for it are started again.

        SIGTERM and SIGINT are passed on as one SIGTERM to each rank, and the ranks may take the
        time that they need to save; a second SIGINT ends them at once.

        Returns:
            The exit code: 0 when all ended well, else that of the rank which was the reason, 4
            when it was killed.

        Raises:
            InputError: a rank cannot be started.
        """
        with self._signals():
            for number in range(RESTARTS + 1):
                try:
                    self._start({STARTS: str(number)})
                    self._watch()
                finally:
                    self._end()
                culprit = self._culprit()
                if culprit is None or culprit.weight != Weight.AGAIN or self._requests:
                    return self._told(culprit)
                reason = [line.removeprefix("modicum: ") for line in culprit.printed()[-1:]]
                self._say("; ".join([*reason, "all ranks start again"]))
            self._say(f"the ranks cannot continue; they were started {RESTARTS + 1} times")
            return Interrupted.exit_code

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self._requests.append(number)

        before: dict[int, Any] = {
            number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # Starting and looking

    def _start(self, again: dict[str, str]) -> None:
        self._ranks, self._selector = [], selectors.DefaultSelector()
        self._failed_since: float | None = None
        shared = self._environment | shared_environment(self._size, self._environment) | again
        # A terminal's Ctrl-C reaches every process; it is one request, and the supervisor's. Ranks
        # are born with it blocked, and so it is from their first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for number in range(self._size):
                own = {"RANK": str(number), "LOCAL_RANK": str(number)}
                self._start_one(number, shared | own)
        except OSError as error:
            problem = f"rank {number} cannot be started: {error.strerror}"
            raise InputError(problem, file=self._command[0]) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start_one(self, number: int, environment: Mapping[str, str]) -> None:
        kept: dict[str, Any] = {}
        if number:
            out = subprocess.PIPE
            kept = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(self._command, env=environment, **kept)
        self._ranks.append(RankProcess(number, process))
        if process.stdout is not None:
            self._selector.register(process.stdout, selectors.EVENT_READ, self._ranks[-1])

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.code is None]

    def _failed(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.code]

    def _tick(self, seconds: float = _TICK) -> None:
        """Wait a moment; take what was printed, and see who has ended."""
        for key, _ in self._selector.select(seconds):
            stream: IO[bytes] = key.fileobj  # type: ignore[assignment]
            data = os.read(stream.fileno(), 1 << 16)
            if data:
                key.data.tail.feed(data)
            else:
                self._selector.unregister(stream)
        for rank in self._alive():
            rank.process.poll()
        hard = [rank for rank in self._failed() if rank.weight != Weight.ASKED]
        if hard and self._failed_since is None:
            self._failed_since = time.monotonic()

    # Ending

    def _watch(self) -> None:
        """Until all ranks have ended: by themselves, or because one of them did."""
        while self._alive() and not self._failed() and not self._requests:
            self._tick()
        settled = time.monotonic() + _SETTLE
        while self._alive() and not self._requests and time.monotonic() < settled:
            if any(rank.weight == Weight.KILLED for rank in self._failed()):
                break
            self._tick()
        for rank in self._alive():
            rank.send(signal.SIGTERM)
        activity = Activity()
        while self._alive():
            self._tick()
            if self._out_of_patience(activity):
                for rank in self._alive():
                    rank.send(signal.SIGKILL)

    def _out_of_patience(self, activity: Activity) -> bool:
        """Whether ranks that were asked to end have had their time."""
        if signal.SIGINT in self._requests[1:]:
            return True
        if self._failed_since is not None:
            return time.monotonic() - self._failed_since > _GRACE
        # All of them alive, they may wait for one that computes.
        together = len(self._alive()) == self._size
        return not together and activity.idle([rank.process.pid for rank in self._alive()])

    def _end(self) -> None:
        """Make sure that nothing is left, and take the last of what was printed."""
        for rank in self._alive():
            rank.send(signal.SIGKILL)
            rank.process.wait()
        last = time.monotonic() + _SETTLE  # something that a rank has started may hold its pipe
        while self._selector.get_map() and time.monotonic() < last:
            self._tick(0.01)
        self._selector.close()
        for rank in self._ranks:
            if rank.process.stdout is not None:
                rank.process.stdout.close()

    # Who it was

    def _culprit(self) -> RankProcess | None:
        """The rank whose end is the reason for the others'; None where all left as asked."""
        alone = [rank for rank in self._failed() if not rank.asked]
        for group in (alone, self._failed()):
            found = [rank for rank in group if rank.weight < Weight.ASKED]
            if found:
                return min(found, key=lambda rank: (rank.weight, rank.number))
        return None

    def _told(self, culprit: RankProcess | None) -> int:
        """Say what rank 0 has not said itself; the exit code."""
        first = self._ranks[0].code or 0
        if first < 0 and sys.stderr.isatty():
            print("\x1b[?25h", end="", file=sys.stderr)  # a live line has hidden the cursor
        if culprit is None or culprit.weight == Weight.AGAIN:
            if not self._failed():
                return 0
            if first != Interrupted.exit_code:
                asked = self._requests or any(
                    rank.weight == Weight.ASKED for rank in self._failed()
                )
                why = "interrupted" if asked else "the ranks have lost each other"
                self._say(f"{why}; the same command resumes")
            return Interrupted.exit_code
        if culprit.number and culprit.code != -signal.SIGKILL:  # of which it knew nothing
            for line in culprit.printed():
                print(line, file=sys.stderr)
        if culprit.weight == Weight.TOLD:
            return culprit.code or 0
        told = f"{culprit.how}; the other ranks were ended"
        if culprit.weight == Weight.KILLED:
            self._say(f"{told}; the same command resumes from the last checkpoint")
            return Interrupted.exit_code
        self._say(told)
        return 1


def shared_environment(size: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that ranks of one machine share, as torchrun has them, and our own process.

    >>> variables = shared_environment(2, {"OMP_NUM_THREADS": "3"})
    >>> variables["WORLD_SIZE"], variables["MASTER_ADDR"], "OMP_NUM_THREADS" in variables
    ('2', '127.0.0.1', False)
    """
    variables = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        SUPERVISOR: str(os.getpid()),
    }
    if "OMP_NUM_THREADS" not in environment:
        variables["OMP_NUM_THREADS"] = str(max(1, usable_cores() // size))
    # Left alone, gloo listens where the host's name leads, which need not be this machine.
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback and "GLOO_SOCKET_IFNAME" not in environment:
        variables["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return variables


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
