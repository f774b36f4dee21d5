"""A rank's calls in shared memory, where another process finds them whatever the rank does.

The rank maps a file and writes into it; who reads it needs nothing of the rank, which may be
stopped, dead, or in a call that holds the interpreter's lock. A record is written body first and
number last, so one that is being written is passed over. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.ranks.observed_calls import MESSAGES, ObservedCall

MAGIC = b"modring1"
CAPACITY = 1024
# magic, rank, pid, calls written, beat, how it left, mark, place, words, bytes of the groups' JSON
_HEADER = struct.Struct("<8sIIQdBB160s240sI")
_WRITTEN, _BEAT, _LEFT, _MARK, _PLACE, _WORDS, _GROUPS = 16, 24, 32, 33, 34, 194, 434
_TEXT, _RECORDS = 512, 32768
# number + 1, sequence, index of the group, mark, kind, label, bytes, asked, begun, ended, waited,
# awaited
_RECORD = struct.Struct("<QQHB16s64sQddddd")
_NUMBER = struct.Struct("<Q")
_TIMES = struct.Struct("<ddddd")
_TIMES_AT, _MARK_AT = _RECORD.size - _TIMES.size, struct.calcsize("<QQH")
_SLOT = 160

RING_BYTES = _RECORDS + CAPACITY * _SLOT

RUNNING, ENDED, FAILED, BEREFT = 0, 1, 2, 3
"""How a rank left: not yet, in order, by an error of its own, or since it lost another rank."""


@dataclass(frozen=True)
class RingState:
    """What a ring says of its rank at an instant; times are of its host's monotonic clock."""

    rank: int
    pid: int
    written: int
    beat: float
    left: int
    marked: bool
    place: str
    words: str
    groups: Mapping[str, tuple[int, ...]]


class RingWriter:
    """An observer of calls that writes them into a file of fixed size.

    Args:
        path: the file; one that is there is replaced.
    """

    def __init__(self, path: Path, rank: int, capacity: int = CAPACITY) -> None:
        self._capacity, self._lock = capacity, threading.Lock()
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._keys: list[tuple[str, int] | None] = [None] * capacity
        self._fresh = deque[ObservedCall]()  # messages that are not written yet
        self._awaited = dict[int, ObservedCall]()  # those that have not ended
        self._written, self.marked = 0, False
        with open(path, "w+b") as file:
            size = _RECORDS + capacity * _SLOT
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):  # or full memory would end the rank by SIGBUS
                os.posix_fallocate(file.fileno(), 0, size)
            self._map = mmap.mmap(file.fileno(), 0)
        begun = (rank, os.getpid(), 0, time.monotonic(), RUNNING, 0, b"", b"", 0)
        _HEADER.pack_into(self._map, 0, MAGIC, *begun)

    def began(self, call: ObservedCall) -> None:
        """Write a record of it over the oldest one.

        A message's is written with what comes next, as a rule when it is waited for, at the latest
        by a beat: between a send and the receive that follows it nothing may take time.
        """
        if call.kind in MESSAGES:
            self._fresh.append(call)
            return
        with self._lock:
            self._write_fresh()
            self._begin(call)

    def changed(self, call: ObservedCall) -> None:
        """Write its times again, if its record is still there."""
        with self._lock:
            self._write_fresh()
            number = self._numbers.get((call.group, call.sequence))
            if number is not None:
                if call.done:
                    self._awaited.pop(number, None)
                self._write_times(number, call)

    def _write_fresh(self) -> None:
        while self._fresh:
            self._begin(self._fresh.popleft())

    def _begin(self, call: ObservedCall) -> None:
        number, self._written = self._written, self._written + 1
        slot = number % self._capacity
        if (old := self._keys[slot]) is not None:
            self._numbers.pop(old, None)
        key = self._keys[slot] = (call.group, call.sequence)
        self._numbers[key] = number
        self._awaited.pop(number - self._capacity, None)
        if call.kind in MESSAGES and not call.done:
            self._awaited[number] = call
        self._write(number, call)
        struct.pack_into("<Q", self._map, _WRITTEN, self._written)

    def beat(self, place: str) -> None:
        """Say that a thread of the rank runs, and where the rank's main thread is.

        Messages that nothing has written yet are written as well.
        """
        with self._lock:
            self._write_fresh()
            for number, call in self._awaited.items():
                if not math.isnan(call.awaited):
                    self._write_times(number, call)
        struct.pack_into("<160s", self._map, _PLACE, _text(place, 160))
        struct.pack_into("<d", self._map, _BEAT, time.monotonic())

    def mark(self, *, marked: bool) -> None:
        """Say that what follows is no ordinary step: an evaluation, a save."""
        self.marked = marked
        struct.pack_into("<B", self._map, _MARK, marked)

    def leave(self, how: int, words: str = "") -> None:
        """Say that the rank ends, and how; the first one counts."""
        if struct.unpack_from("<B", self._map, _LEFT)[0] == RUNNING:
            struct.pack_into("<240s", self._map, _WORDS, _text(words, 240))
            struct.pack_into("<B", self._map, _LEFT, how)

    def _group(self, call: ObservedCall) -> int:
        key = (call.group, call.members)
        if key not in self._groups:
            text = json.dumps([*self._groups, key]).encode()
            if len(text) > _RECORDS - _TEXT:  # too many to tell; its calls count as one group's
                return 0
            self._groups[key] = len(self._groups)
            self._map[_TEXT : _TEXT + len(text)] = text
            struct.pack_into("<I", self._map, _GROUPS, len(text))
        return self._groups[key]

    def _write(self, number: int, call: ObservedCall) -> None:
        at = _RECORDS + number % self._capacity * _SLOT
        body = (call.sequence, self._group(call), self.marked, _text(call.kind, 16))
        times = (call.asked, call.begun, call.ended, call.waited, call.awaited)
        _RECORD.pack_into(self._map, at, 0, *body, _text(call.label, 64), call.bytes, *times)
        _NUMBER.pack_into(self._map, at, number + 1)

    def _write_times(self, number: int, call: ObservedCall) -> None:
        at = _RECORDS + number % self._capacity * _SLOT
        times = (call.asked, call.begun, call.ended, call.waited, call.awaited)
        _NUMBER.pack_into(self._map, at, 0)
        self._map[at + _MARK_AT] = self.marked
        _TIMES.pack_into(self._map, at + _TIMES_AT, *times)
        _NUMBER.pack_into(self._map, at, number + 1)


@dataclass(frozen=True)
class RingCall:
    """A record of a ring: a call, and whether it was marked as no ordinary step's."""

    number: int
    call: ObservedCall
    marked: bool


class RingReader:
    """Reads a rank's ring.

    Raises:
        InputError: the file is none.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._map) < _RECORDS or self._map[:8] != MAGIC:
            raise InputError("is no ring of calls", file=path)
        self._capacity = (len(self._map) - _RECORDS) // _SLOT
        self._known: list[tuple[str, tuple[int, ...]]] = []

    def state(self) -> RingState:
        """What it says of its rank now."""
        _, rank, pid, written, beat, left, mark, place, words, length = _HEADER.unpack_from(
            self._map, 0
        )
        with suppress(ValueError):  # it is being written: those known hold until the next look
            found: list[Any] = json.loads(self._map[_TEXT : _TEXT + length] or b"[]")
            self._known = [(name, tuple(members)) for name, members in found]
        texts = (_string(place), _string(words))
        # Of two groups of one name the second one is.
        return RingState(rank, pid, written, beat, left, bool(mark), *texts, dict(self._known))

    def call(self, number: int) -> RingCall | None:
        """The call of a number; None where it is gone, or is being written."""
        at = _RECORDS + number % self._capacity * _SLOT
        (now, sequence, group, mark, kind, label, *values) = _RECORD.unpack_from(self._map, at)
        again = struct.unpack_from("<Q", self._map, at)[0]
        if now != number + 1 or again != now or group >= len(self._known):
            return None
        sent, asked, begun, ended, waited, awaited = values
        name, members = self._known[group]
        call = ObservedCall(
            sequence, _string(kind), name, members, _string(label), sent,
            asked, begun, ended, waited, awaited=awaited,
        )  # fmt: skip
        return RingCall(number, call, bool(mark))

    def is_gone(self, number: int) -> bool:
        """Whether another call was written over one; else it may be read again."""
        at = _RECORDS + number % self._capacity * _SLOT
        now: int = struct.unpack_from("<Q", self._map, at)[0]
        return now > number + 1

    def since(self, number: int) -> range:
        """The numbers of the calls from this one on that are still there."""
        written = struct.unpack_from("<Q", self._map, _WRITTEN)[0]
        return range(max(number, written - self._capacity), written)


def _text(words: str, most: int) -> bytes:
    return words.encode("utf-8", "replace")[:most]


def _string(packed: bytes) -> str:
    return packed.rstrip(b"\0").decode("utf-8", "ignore")
