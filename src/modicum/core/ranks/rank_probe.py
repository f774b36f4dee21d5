"""What a process next to a rank sees of it: its ring, and the state of its process.

The rank need not do anything for it, so a stopped or dead process is seen, and one whose threads
wait for the interpreter's lock. Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from modicum.core.ranks.call_ring import RingReader
from modicum.core.ranks.observed_calls import MESSAGES, is_link
from modicum.core.ranks.rank_reports import (
    MOST_CALLS,
    MOST_GROUPS,
    MOST_OPEN,
    DoneCall,
    OpenCall,
    RankReport,
)

Value = TypeVar("Value")
STARVED_SECONDS = 4.0  # of which it is said for how much a rank had no processor


def process_state(pid: int) -> str:
    """Whether a process is `running`, `stopped` by a signal, or `dead`; by /proc where that is.

    One that a debugger holds counts as running: who debugs it lets it run again.

    >>> process_state(os.getpid())
    'running'
    """
    try:
        if not Path("/proc/self/stat").exists():
            os.kill(pid, 0)
            return "running"
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    except PermissionError:
        return "running"
    state = text.rpartition(")")[2].split()[0]
    return {"T": "stopped", "Z": "dead", "X": "dead"}.get(state, "running")


def seconds_without_processor(pid: int) -> float:
    """For how long the main thread of a process was ready to run and did not; 0: nobody counts.

    >>> seconds_without_processor(os.getpid()) >= 0
    True
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class RankProbe:
    """Looks at a rank of this host again and again.

    Args:
        path: its ring.

    Attributes:
        exited: a descriptor that is readable once the process is dead; None where there is none.
    """

    def __init__(self, path: Path) -> None:
        self._ring = RingReader(path)
        state = self._ring.state()
        self.rank, self.pid = state.rank, state.pid
        self._next, self._open = 0, dict[int, OpenCall]()
        self._messages = dict[int, OpenCall]()  # that have not ended, and that nobody waits for
        self._unread = set[int]()  # that were being written
        self._entered: dict[str, int] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._process, self._since = "running", time.monotonic()
        self._starved = deque([(self._since, seconds_without_processor(self.pid))])
        self.exited: int | None = None
        with suppress(AttributeError, OSError):
            self.exited = os.pidfd_open(self.pid)

    @property
    def ended(self) -> bool:
        """Whether the process is dead."""
        return self._process == "dead"

    @property
    def stopped(self) -> bool:
        """Whether the process was stopped by a signal when it was last looked at."""
        return self._process == "stopped"

    def look(self) -> RankReport:
        """What is new since the last look, and what is so now."""
        now, process = time.monotonic(), process_state(self.pid)
        if self._process == "dead":  # another process may have its number by now
            process = "dead"
        if process != self._process:
            self._process, self._since = process, now
        state = self._ring.state()
        done = self._calls(now)
        return RankReport(
            rank=self.rank,
            host=_printable(socket.gethostname()[:255]),
            process=process,
            process_seconds=now - self._since,
            beat_seconds=max(0.0, now - state.beat),
            starved=self._share_without_processor(now),
            left=state.left,
            words=_printable(state.words),
            marked=state.marked,
            place=_printable(state.place),
            entered=dict(_links_first(self._entered)[-MOST_GROUPS:]),
            members=dict(_links_first(state.groups)[-MOST_GROUPS:]),
            open=_first_and_last(self._open),
            done=tuple(done),
            unawaited=tuple(self._messages[n] for n in sorted(self._messages)[:MOST_OPEN]),
        )

    def end(self, signal_number: int = signal.SIGKILL) -> None:
        """Send the process a signal, if it lives."""
        if process_state(self.pid) != "dead" and not self.ended:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal_number)

    def _share_without_processor(self, now: float) -> float:
        samples = self._starved
        samples.append((now, seconds_without_processor(self.pid)))
        while len(samples) > 2 and samples[1][0] <= now - STARVED_SECONDS:
            samples.popleft()
        (begun, before), (_, waited) = samples[0], samples[-1]
        return min(1.0, max(0.0, waited - before) / (now - begun)) if now > begun else 0.0

    def _calls(self, now: float) -> list[DoneCall]:
        fresh = self._ring.since(self._next)
        done: list[DoneCall] = []
        for number in [*sorted({*self._open, *self._messages, *self._unread}), *fresh]:
            if len(done) == MOST_CALLS:
                break
            found = self._ring.call(number)
            if found is None and not self._ring.is_gone(number):
                if number >= self._next:  # what is known of another holds until the next look
                    self._next = number + 1
                    self._unread.add(number)
                continue
            self._next = max(self._next, number + 1)
            self._unread.discard(number)
            self._open.pop(number, None)
            self._messages.pop(number, None)
            if found is None:
                continue
            call = found.call
            if self._members.setdefault(call.group, call.members) != call.members:
                self._members[call.group] = call.members  # made anew, under the name of another
                self._entered[call.group] = 0
            which = (call.group, call.sequence, _printable(call.kind), _printable(call.label))
            if call.done:
                took = max(0.0, call.ended - call.begun)
                more = (found.marked, max(0.0, call.waited))
                done.append(DoneCall(*which, call.bytes, took, call.ended, *more))
            self._entered[call.group] = max(self._entered.get(call.group, 0), call.sequence + 1)
            if call.done:
                continue
            since = call.awaited if call.kind in MESSAGES else call.begun
            if math.isnan(since):  # of a message that nobody waits for yet
                self._messages[number] = OpenCall(*which, 0.0, call.bytes)
            else:
                self._open[number] = OpenCall(*which, max(0.0, now - since), call.bytes)
        return done


def _first_and_last(calls: Mapping[int, Value]) -> tuple[Value, ...]:
    """As many calls as a report has, by their numbers: what came first is what does not end.

    >>> _first_and_last({number: number for number in range(20)})[6:10]
    (6, 7, 12, 13)
    """
    numbers = sorted(calls)
    if len(numbers) > MOST_OPEN:
        numbers = numbers[: MOST_OPEN // 2] + numbers[-MOST_OPEN // 2 :]
    return tuple(calls[number] for number in numbers)


def _links_first(groups: Mapping[str, Value]) -> list[tuple[str, Value]]:
    """Groups, behind what messages are counted under."""
    return sorted(groups.items(), key=lambda item: not is_link(item[0]))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
