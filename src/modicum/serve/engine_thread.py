"""An engine on a thread of its own, for callers who must not wait for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from modicum.serve.tokens import EngineEvent, Failed, MadeToken, TokenEngine, TokenRequest

Listener: TypeAlias = Callable[[str, EngineEvent], None]
log = logging.getLogger(__name__)


class EngineBusy(Exception):
    """There is no room for more requests just now."""


class EngineClosed(Exception):
    """The engine ends, and so do its requests."""


class EngineThread:
    """Runs an engine, and bounds how many requests it has.

    Args:
        engine: is called by this thread alone.
        room: at most so many requests that are not at their end.
    """

    def __init__(self, engine: TokenEngine, *, room: int = 64) -> None:
        self._engine, self.room = engine, room
        self._changed = threading.Condition()
        self._inbox: deque[TokenRequest | str] = deque()
        self._listeners: dict[str, Listener] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[TokenRequest], heard: Listener) -> None:
        """Have tokens made for all of these requests, or for none.

        Args:
            heard: called on the engine's thread with each event; the last of a request is `Ended`
                or `Failed`.

        Raises:
            EngineBusy: there is no room for them.
            EngineClosed: the engine takes no more requests.
        """
        with self._changed:
            self.check_room(len(requests))
            self._inbox.extend(requests)
            self._listeners |= {request.id: heard for request in requests}
            self._changed.notify()

    def check_room(self, count: int) -> None:
        """Refuse so many requests if `submit` would refuse them now.

        Raises:
            EngineBusy: there is no room for them.
            EngineClosed: the engine takes no more requests.
        """
        with self._changed:
            if self._closing:
                raise EngineClosed("the server is closing")
            if len(self._listeners) + count > self.room:
                raise EngineBusy(f"{len(self._listeners)} are being answered or wait")

    def cancel(self, ids: Iterable[str]) -> None:
        """Forget requests, of which nothing more is heard; those that have ended are no error."""
        with self._changed:
            known = [each for each in ids if self._listeners.pop(each, None) is not None]
            self._inbox.extend(known)
            self._changed.notify()

    def close(self, wait: float = 5.0) -> None:
        """Fail what is not at its end, and stop after the call of the model that is in progress.

        Args:
            wait: seconds to wait for that call.
        """
        with self._changed:
            self._closing = True
            open_now, self._listeners = self._listeners, {}
            self._changed.notify()
        for name, heard in open_now.items():
            heard(name, Failed(EngineClosed("the server is closing")))
        self._thread.join(wait)

    def _run(self) -> None:
        while self._take():
            try:
                for name, event in self._engine.step():
                    self._tell(name, event)
                    if self._closing:
                        return
            except Exception as error:  # the engine's own mistake: whoever waits must hear of it
                log.exception("the engine failed")
                with self._changed:
                    names = list(self._listeners)
                for name in names:
                    self._engine.cancel(name)
                    self._tell(name, Failed(error))

    def _take(self) -> bool:
        """Wait for something to do, and pass on what came; whether to continue."""
        with self._changed:
            while not (self._closing or self._inbox or self._engine.requests):
                self._changed.wait()
            came, self._inbox = self._inbox, deque()
            for each in came:
                if isinstance(each, str):
                    self._engine.cancel(each)
                else:
                    self._engine.submit(each)
            return not self._closing

    def _tell(self, name: str, event: EngineEvent) -> None:
        with self._changed:
            last = not isinstance(event, MadeToken)
            heard = self._listeners.pop(name, None) if last else self._listeners.get(name)
        if heard is not None:
            heard(name, event)
