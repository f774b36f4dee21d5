"""What ranks tell each other by the store in which they met; one that does not come is named.

A collective waits half an hour for a rank that is stopped or unreachable, and does not know which
one that is. Here every wait has an end. It is for what ranks agree on before they watch each other.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from modicum.core.ranks.environment import met_store
from modicum.core.ranks.ranks import MEETING, PeerLost, host_key
from modicum.core.torch_private import default_store

T = TypeVar("T")
# How long ranks that have just met wait for one of which they hear nothing.
SILENT_SECONDS = 6.0
# Rank 0, whose process keeps the store as a rule, leaves last: the others then know who is missing.
_GRACE_SECONDS = 1.0
_BEAT_SECONDS, _LOOK_SECONDS = 1.0, 0.25
_LEAST_PAUSE, _PAUSE = 0.002, 0.05


class RollCall:
    """Values of JSON that ranks tell and ask of each other by name, while they show that they live.

    All ranks make the same roll calls in the same order, each in a `with`. Who waits raises
    `PeerLost` where another rank is missing or the store is gone, with number and host.

    Args:
        topic: what ranks agree on, for people: `their setup`.
        rank, size: this process among the ranks.
        coming_seconds: how long a rank may take to begin the roll call. One that has begun is
            missing when nothing was heard of it for `SILENT_SECONDS`, or after `MEETING`.
    """

    def __init__(
        self, topic: str, rank: int, size: int, *, coming_seconds: float = SILENT_SECONDS
    ) -> None:
        self._topic, self._rank, self._size = topic, rank, size
        self._coming = coming_seconds
        self._answered, self._over = time.monotonic(), threading.Event()
        self._waits_for: list[int] = []
        self._hosts: dict[int, str] = {}
        self._store: dist.Store = self._soon(self._opened)
        self._beats = threading.Thread(target=self._beat, name="modicum roll call", daemon=True)
        self._beats.start()

    def tell(self, name: str, value: Any = None) -> None:
        """Tell this rank's value of a name."""
        self._soon(lambda: self._store.set(_key(name, self._rank), json.dumps(value)))

    def ask(self, name: str, *ranks: int) -> list[Any]:
        """The values that these ranks tell of a name, once all of them have."""
        return self._soon(lambda: self._told(name, ranks))

    def gather(self, name: str, value: Any) -> list[Any]:
        """Every rank's value of a name, in order, at every rank."""
        self.tell(name, value)
        values = self.ask(name, *range(self._size))
        self.tell(f"read {name}")
        if self._rank == 0:  # who may end now, and the store with it
            self.ask(f"read {name}", *range(self._size))
        return values

    def __enter__(self) -> RollCall:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._beats.join(_LOOK_SECONDS)

    # Calls of the store are made in threads: one that is unreachable never answers

    def _soon(self, work: Callable[[], T]) -> T:
        answer: Future[T] = Future()
        self._answered, self._waits_for = time.monotonic(), []

        def run() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:  # raised where the answer is waited for
                answer.set_exception(error)

        threading.Thread(target=run, name="modicum roll call", daemon=True).start()
        while True:
            try:
                return answer.result(0.1)
            except TimeoutError:
                if time.monotonic() - self._answered > SILENT_SECONDS:
                    self._over.set()
                    silent = f"does not answer since {SILENT_SECONDS:g} s"
                    raise self._lost(f"{self._name(0)}, where the ranks met, {silent}") from None
            except RuntimeError as error:
                late = self._waits_for if 0 not in self._waits_for else []
                also = "".join(f", and {self._name(rank)} had not come" for rank in late)
                raise self._lost(f"{self._name(0)}, where the ranks met, is gone{also}") from error

    def _opened(self) -> dist.Store:
        """The part of the store that belongs to this roll call."""
        store = met_store()
        turn = store.add(f"roll calls of {self._rank}", 1)
        default_store().set(host_key(self._rank), socket.gethostname())
        self._note_host(0)
        return dist.PrefixStore(f"roll call/{turn}", store)

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # who waits for an answer says that the store is gone
            while not self._over.is_set():
                self._store.set(_key("beat", self._rank), str(count))
                count += 1
                self._over.wait(_BEAT_SECONDS)

    def _told(self, name: str, ranks: Collection[int]) -> list[Any]:
        self._waits_for = missing = list(ranks)
        grace = _GRACE_SECONDS * (self._rank == 0)
        signs, pause, looked = _SignsOfLife(self._coming + grace, grace), _LEAST_PAUSE, 0.0
        while True:
            while missing and self._store.check([_key(name, missing[0])]):
                del missing[0]
            self._answered = time.monotonic()
            if not missing:
                return [json.loads(self._store.get(_key(name, rank))) for rank in ranks]
            if self._answered - looked > _LOOK_SECONDS:
                looked = self._answered
                silent = signs.silent({rank: self._beat_of(rank) for rank in missing})
                # Who has said it may have left.
                late = [rank for rank in silent if not self._store.check([_key(name, rank)])]
                if late:
                    raise self._missing(late, max(silent[rank] for rank in late))
            if self._over.wait(pause):
                raise self._lost("nobody waits for it any more")
            pause = min(2 * pause, _PAUSE)

    def _beat_of(self, rank: int) -> str | None:
        key = _key("beat", rank)
        return self._store.get(key).decode() if self._store.check([key]) else None

    # What is said

    def _missing(self, ranks: Collection[int], seconds: float) -> PeerLost:
        for rank in ranks:
            self._note_host(rank)
        names, verb = " and ".join(map(self._name, ranks)), "give" if len(ranks) > 1 else "gives"
        return self._lost(f"{names} {verb} no sign of life since {seconds:.0f} s")

    def _lost(self, what: str) -> PeerLost:
        return PeerLost(
            f"{what}, while ranks agreed on {self._topic}, so this one ends; the same command "
            "resumes from the last checkpoint"
        )

    def _note_host(self, rank: int) -> None:
        store, key = default_store(), host_key(rank)
        if store.check([key]):
            self._hosts[rank] = store.get(key).decode()

    def _name(self, rank: int) -> str:
        # Where rank 0 was not heard of, the others know at least where they met.
        host = self._hosts.get(rank, os.environ.get("MASTER_ADDR") if rank == 0 else None)
        return f"rank {rank}" + (f" (host {host})" if host else "")


class _SignsOfLife:
    """Which of the ranks that are waited for have shown no sign of life for too long."""

    def __init__(self, coming_seconds: float, grace_seconds: float) -> None:
        self._coming, self._grace = coming_seconds, grace_seconds
        self._begun = time.monotonic()
        self._last: dict[int, tuple[str, float]] = {}

    def silent(self, beats: Mapping[int, str | None]) -> dict[int, float]:
        """Those, and since how many seconds."""
        now, found = time.monotonic(), dict[int, float]()
        for rank, beat in beats.items():
            if beat is not None and (rank not in self._last or self._last[rank][0] != beat):
                self._last[rank] = beat, now
            since, most = self._begun, self._coming
            if rank in self._last:
                since, most = self._last[rank][1], SILENT_SECONDS + self._grace
            if now - since > most or now - self._begun > MEETING.total_seconds() + self._grace:
                found[rank] = now - since
        return found


def _key(name: str, rank: int) -> str:
    return f"{name} of {rank}"
