"""An engine on its thread: its room, its end, and what happens when it fails."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
from tests.serve.conftest import eventually

from modicum.serve.engine_thread import EngineBusy, EngineClosed, EngineThread
from modicum.serve.tokens import Ended, EngineEvent, Failed, MadeToken, TokenRequest


class Scripted:
    """An engine that makes the tokens 1, 2, 3 of each request, when it is let."""

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)
        self.open: dict[str, int] = {}
        self.broken: Exception | None = None

    @property
    def requests(self) -> int:
        return len(self.open)

    def submit(self, request: TokenRequest) -> None:
        self.open[request.id] = 0

    def cancel(self, request_id: str) -> None:
        self.open.pop(request_id, None)

    def step(self) -> Iterator[tuple[str, EngineEvent]]:
        for name in list(self.open):
            self.let.acquire(timeout=60)
            if self.broken is not None:
                raise self.broken
            self.open[name] += 1
            if self.open[name] < 4:
                yield name, MadeToken(self.open[name])
            else:
                del self.open[name]
                yield name, Ended("stop")


@pytest.fixture
def engine() -> Scripted:
    return Scripted()


@pytest.fixture
def thread(engine: Scripted) -> Iterator[EngineThread]:
    before = set(threading.enumerate())
    made = EngineThread(engine, room=2)
    yield made
    engine.let.release(1000)
    made.close()
    assert not before.symmetric_difference(threading.enumerate())


Heard = queue.Queue[tuple[str, EngineEvent]]


def submitted(thread: EngineThread, *names: str) -> Heard:
    heard: Heard = queue.Queue()
    requests = [TokenRequest(name, (1,), 9) for name in names]
    thread.submit(requests, lambda name, event: heard.put((name, event)))
    return heard


def test_events_come_in_order_and_the_room_is_free_again(
    thread: EngineThread, engine: Scripted
) -> None:
    engine.let.release(1000)
    for name in "abc":
        heard = submitted(thread, name)
        found = [heard.get(timeout=60) for _ in range(4)]
        assert found == [(name, MadeToken(n)) for n in (1, 2, 3)] + [(name, Ended("stop"))]
    assert eventually(lambda: engine.requests == 0)


def test_a_request_without_room_is_refused_in_full(thread: EngineThread, engine: Scripted) -> None:
    first = submitted(thread, "a")
    with pytest.raises(EngineBusy, match="1 are being answered"):
        submitted(thread, "b", "c")
    second = submitted(thread, "b")
    with pytest.raises(EngineBusy):
        thread.check_room(1)
    thread.cancel(["a", "unknown"])
    third = submitted(thread, "c")
    engine.let.release(1000)
    assert second.get(timeout=60) == ("b", MadeToken(1))
    assert third.get(timeout=60) == ("c", MadeToken(1))
    assert eventually(lambda: engine.requests == 0)
    assert first.qsize() <= 1  # nothing is heard of what was cancelled, but for a token before


def test_when_the_engine_itself_fails_all_hear_of_it_and_it_continues(
    thread: EngineThread, engine: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    engine.broken = RuntimeError("planted")
    heard = submitted(thread, "a", "b")
    engine.let.release()
    failed = dict(heard.get(timeout=60) for _ in range(2))
    assert failed == {"a": Failed(engine.broken), "b": Failed(engine.broken)}
    assert "planted" in caplog.text
    engine.broken = None
    engine.let.release(1000)
    assert submitted(thread, "c").get(timeout=60) == ("c", MadeToken(1))


def test_what_is_open_when_it_closes_hears_so(engine: Scripted) -> None:
    thread = EngineThread(engine, room=2)
    heard = submitted(thread, "a", "b")
    threading.Timer(0.05, engine.let.release).start()
    thread.close()
    for name in "ab":
        found, event = heard.get(timeout=60)
        while isinstance(event, MadeToken):
            found, event = heard.get(timeout=60)
        assert found == name
        assert isinstance(event, Failed)
        assert isinstance(event.error, EngineClosed)
    with pytest.raises(EngineClosed):
        submitted(thread, "c")
