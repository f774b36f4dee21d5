"""Who may speak on the side channel: both ends know the secret, and others are there briefly."""

from __future__ import annotations

import errno
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from modicum.core.ranks import side_channel
from modicum.core.ranks.side_channel import AgentLine, Controller


@pytest.fixture
def controller() -> Iterator[Controller]:
    """One of two ranks."""
    made = Controller("127.0.0.1", "secret", 2)
    yield made
    made.close()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def line_of(there: socket.socket) -> bytes:
    """A line of a socket without its end, and nothing after it."""
    line = b""
    while not line.endswith(b"\n") and (more := there.recv(1)):
        line += more
    return line.removesuffix(b"\n")


def proof(who: bytes, *challenges: bytes) -> bytes:
    """What an end says that knows the secret."""
    return hmac.new(b"secret", b" ".join((who, *challenges)), "sha256").hexdigest().encode()


def stranger(to: Controller) -> socket.socket:
    return socket.create_connection(("127.0.0.1", to.port), timeout=20)


@pytest.mark.parametrize("knows", [True, False])
def test_an_agent_says_nothing_to_a_controller_that_does_not_know_the_secret(knows: bool) -> None:
    """One that does not can send back no more than what it was sent."""
    heard: list[bytes] = []

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as agent:
            agent.settimeout(20)
            agent.sendall(b"challenge\n")
            own, _, echo = line_of(agent).partition(b" ")
            true = proof(b"controller", b"challenge", own)
            agent.sendall((true if knows else echo) + b"\n")
            heard.append(line_of(agent))

    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as ended:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        ended.callback(thread.join)
        if not knows:
            ended.enter_context(pytest.raises(ValueError, match="does not know the secret"))
        AgentLine("127.0.0.1", listener.getsockname()[1], "secret", [1]).close()
    assert heard == [b"[1]" if knows else b""]


@pytest.mark.parametrize(
    "ranks",
    [b"[" * 100_000, b"[]", b"[2]", b"[true]", b"[0, 1, 0]", b"0"],
    ids=lambda ranks: ascii(ranks[:9]),
)
def test_an_agent_of_no_ranks_is_refused(controller: Controller, ranks: bytes) -> None:
    with stranger(controller) as agent, suppress(OSError):
        challenge = line_of(agent)
        agent.sendall(b"own " + proof(b"agent", challenge, b"own") + b"\n" + ranks + b"\n")
        assert line_of(agent) == proof(b"controller", challenge, b"own")
        assert line_of(agent) == b""
    until(lambda: len(controller.refused) == 1)
    assert controller.agents == 0


def test_a_proof_is_of_one_connection(controller: Controller) -> None:
    left = b""
    with stranger(controller) as one, stranger(controller) as other:
        said = b"own " + proof(b"agent", line_of(one), b"own") + b"\n[0]\n"
        line_of(other)
        with suppress(OSError):  # it was ended
            other.sendall(said)
            left = line_of(other)
        until(lambda: controller.refused == ["who connected does not know the secret"])
    assert left == b""
    assert controller.agents == 0


def test_an_agent_takes_no_event_that_would_move_the_cursor(controller: Controller) -> None:
    """Its sentence is printed."""
    line = AgentLine("127.0.0.1", controller.port, "secret", [1])
    until(lambda: controller.agents == 1)
    controller.tell({"sentence": "\x1b[2Jrank 1 is dead", "ends": True})
    controller.tell({"sentence": "rank 1 is dead", "ends": True})
    until(lambda: not line.open)
    assert line.events() == []
    line.close()


def test_who_says_a_little_now_and_then_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, controller: Controller
) -> None:
    monkeypatch.setattr(side_channel, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(side_channel, "MOST_GREETING_BYTES", 1 << 18)
    with stranger(controller) as slow:

        def refused_after_more() -> bool:
            with suppress(OSError):
                slow.sendall(b"x")
            return bool(controller.refused)

        until(refused_after_more)
    assert controller.agents == 0


def test_of_too_many_strangers_the_first_go_and_an_agent_is_taken(
    monkeypatch: pytest.MonkeyPatch, controller: Controller
) -> None:
    monkeypatch.setattr(side_channel, "MOST_STRANGERS", 2)
    with ExitStack() as ended:
        silent = []
        for _ in range(7):  # of which four are waited for
            silent.append(ended.enter_context(stranger(controller)))
            assert len(line_of(silent[-1])) == 32
        assert [line_of(one) for one in silent[:3]] == [b""] * 3
        until(lambda: len(controller.refused) >= 3)
        line = AgentLine("127.0.0.1", controller.port, "secret", [1])
        until(lambda: controller.agents == 1)
        line.close()


class Hindered(socket.socket):
    """A listener that has no descriptor for the first who connect."""

    hindrances = 3

    def accept(self) -> Any:
        """One, later."""
        if self.hindrances:
            self.hindrances -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_controller_accepts_again_after_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def hindered(host: str) -> socket.socket:
        return Hindered(fileno=socket.create_server((host, 0)).detach())

    monkeypatch.setattr(side_channel, "listening", hindered)
    controller = Controller("127.0.0.1", "secret", 2)
    line = AgentLine("127.0.0.1", controller.port, "secret", [1])
    until(lambda: controller.agents == 1)
    line.close()
    controller.close()
