"""A controller that agents of several hosts reach next to the links on which training travels.

Both ends prove that they know the secret, which itself does not travel here: the agent, then the
controller, answers random challenges by their HMAC. Then an agent sends reports, a line each, of
ranks that are its own, and the controller sends events, the same to all. What is not of that form
ends the connection. Nothing is encrypted, and the secret comes in clear, through the store in which
ranks met: who reads that network is trusted. Nobody waits for an end that does not read, as when a
cable is pulled: that must be said.

Nothing here imports torch.
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from modicum.core.ranks.rank_reports import (
    MOST_BYTES,
    MOST_EVENT_BYTES,
    OVER,
    RankReport,
    parse_event,
    parse_ranks,
    parse_reports,
    report_line,
)

HANDSHAKE_SECONDS = 10.0  # in all, however slowly it comes
MOST_GREETING_BYTES = 128  # of a line of who has proved nothing yet
# So many may have connected and said nothing, and one for each rank; then the first of them go.
MOST_STRANGERS = 64
ACCEPT_AGAIN_SECONDS = 0.1
FLUSH_SECONDS = 3.0
# So much waits for who does not read; then lines are left out.
MOST_WAITING_BYTES = 1 << 20


class Controller:
    """Listens for agents.

    Args:
        host: the address to listen at, `127.0.0.1` where all ranks are on this machine; empty for
            every address of it.
        secret: what agents must know.
        size: how many ranks there are.

    Attributes:
        refused: why connections were ended, the last 100.
    """

    def __init__(self, host: str, secret: str, size: int) -> None:
        self._listener = listening(host)
        self.port: int = self._listener.getsockname()[1]
        self._secret, self._size = secret.encode(), size
        self._reports: queue.Queue[list[RankReport]] = queue.Queue(maxsize=10_000)
        self._agents: dict[socket.socket, tuple[set[int], _Outbox]] = {}
        self._strangers: dict[socket.socket, None] = {}  # in order
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.refused: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def agents(self) -> int:
        """How many are connected."""
        with self._lock:
            return len(self._agents)

    def reports(self) -> list[RankReport]:
        """What has come since the last call."""
        found: list[RankReport] = []
        with suppress(queue.Empty):
            while True:
                found += self._reports.get_nowait()
        return found

    def tell(self, event: dict[str, Any]) -> None:
        """Send an event to all agents."""
        line = json.dumps(event).encode() + b"\n"
        with self._lock:
            outboxes = [outbox for _, outbox in self._agents.values()]
        for outbox in outboxes:
            with suppress(OSError):
                outbox.send(line)

    def close(self) -> None:
        """Listen no more, and end all connections."""
        self._closed.set()
        with self._lock:
            open_ones = [self._listener, *self._strangers, *self._agents]
        for one in open_ones:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                agent, _ = self._listener.accept()
            except OSError:  # it was closed, who came has left, or there is no descriptor just now
                self._closed.wait(ACCEPT_AGAIN_SECONDS)
                continue
            self._make_room(agent)
            try:
                threading.Thread(target=self._serve, args=(agent,), daemon=True).start()
            except RuntimeError:  # there is no thread just now
                self._end(agent)

    def _make_room(self, agent: socket.socket) -> None:
        """For one more, by the end of who has said nothing for longest: an agent is faster."""
        with self._lock:
            self._strangers[agent] = None
            for one in list(self._strangers)[: -MOST_STRANGERS - self._size]:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _serve(self, agent: socket.socket) -> None:
        try:
            lines, until = _Lines(agent), time.monotonic() + HANDSHAKE_SECONDS
            ranks = self._met(agent, lines, until)
            agent.settimeout(None)
            with self._lock:
                if any(ranks & others for others, _ in self._agents.values()):
                    raise ValueError("ranks that another agent has")
                self._strangers.pop(agent, None)
                self._agents[agent] = ranks, _Outbox(agent)
            while line := lines.next(MOST_BYTES):
                reports = parse_reports(line, self._size)
                if {report.rank for report in reports} - ranks:
                    raise ValueError("a rank of another host")
                self._reports.put(reports)
        except (OSError, ValueError) as error:
            self.refused = [*self.refused[-99:], str(error)]
        finally:
            self._end(agent)

    def _met(self, agent: socket.socket, lines: _Lines, until: float) -> set[int]:
        """The ranks of an agent that knows the secret."""
        challenge = _challenge()
        agent.sendall(challenge + b"\n")
        theirs, _, proof = lines.next(MOST_GREETING_BYTES, until).partition(b" ")
        if not hmac.compare_digest(proof, _proof(self._secret, b"agent", challenge, theirs)):
            raise ValueError("who connected does not know the secret")
        agent.sendall(_proof(self._secret, b"controller", challenge, theirs) + b"\n")
        return parse_ranks(lines.next(MOST_BYTES, until), self._size)

    def _end(self, agent: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(agent, None)
            self._agents.pop(agent, None)
        agent.close()


def listening(host: str) -> socket.socket:
    """A socket that listens at an address of this machine, or at every one where it is empty.

    Raises:
        OSError: the address is none of this machine's.
    """
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, dualstack_ipv6=both)


class AgentLine:
    """An agent's connection to the controller.

    Attributes:
        heard: when the controller last said anything; `over` whether it need not any more.

    Raises:
        OSError: it is not reached.
        ValueError: who answers does not know the secret.
    """

    def __init__(self, host: str, port: int, secret: str, ranks: Collection[int]) -> None:
        self._socket = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
        self._lines = _Lines(self._socket)
        try:
            self._meet(secret.encode(), ranks)
        except BaseException:
            self._socket.close()
            raise
        self._outbox = _Outbox(self._socket)
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.heard, self.open, self.over = time.monotonic(), True, False
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, reports: list[RankReport]) -> None:
        """Send what is new; a controller that is gone, or does not read, gets nothing."""
        try:
            self._outbox.send(report_line(reports))
        except OSError:
            self.open = False

    def events(self) -> list[dict[str, Any]]:
        """What the controller has sent since the last call."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    def close(self) -> None:
        """End the connection, when the last reports have left, or after some seconds."""
        self._outbox.flush(FLUSH_SECONDS)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _meet(self, secret: bytes, ranks: Collection[int]) -> None:
        until, challenge = time.monotonic() + HANDSHAKE_SECONDS, _challenge()
        theirs = self._lines.next(MOST_GREETING_BYTES, until)
        proof = _proof(secret, b"agent", theirs, challenge)
        self._socket.sendall(challenge + b" " + proof + b"\n")
        answer = self._lines.next(MOST_GREETING_BYTES, until)
        if not hmac.compare_digest(answer, _proof(secret, b"controller", theirs, challenge)):
            raise ValueError("who answers at the controller's address does not know the secret")
        self._socket.sendall(json.dumps(sorted(ranks)).encode() + b"\n")
        self._socket.settimeout(None)

    def _listen(self) -> None:
        with suppress(OSError, ValueError):
            while line := self._lines.next(MOST_EVENT_BYTES):
                event = parse_event(line)
                self.heard = time.monotonic()
                if event == OVER:
                    self.over = True
                elif event:
                    self._events.put(event)
        self.open = False


class _Outbox:
    """Lines to a socket, sent as far as the other end takes them at once; the rest with later ones.

    While so much waits that the other end must be gone, a line is left out.
    """

    def __init__(self, target: socket.socket) -> None:
        self._target, self._waiting = target, bytearray()

    def flush(self, seconds: float) -> None:
        """Send what waits; after so many seconds it is left."""
        with suppress(OSError):
            self._target.settimeout(seconds)
            self._target.sendall(self._waiting)
        self._waiting.clear()

    def send(self, line: bytes) -> None:
        if len(self._waiting) < MOST_WAITING_BYTES:
            self._waiting += line
        with suppress(BlockingIOError):
            while self._waiting:
                sent = self._target.send(self._waiting, socket.MSG_DONTWAIT)
                del self._waiting[:sent]


class _Lines:
    """Lines of a socket; an empty one when it has ended."""

    def __init__(self, source: socket.socket) -> None:
        self._source, self._held = source, bytearray()

    def next(self, most: int, until: float | None = None) -> bytes:
        """One of so many bytes at most, which must have come by `until` where that is given."""
        while (end := self._held.find(b"\n")) < 0 and len(self._held) <= most:
            if until is not None:
                if (left := until - time.monotonic()) <= 0:
                    raise TimeoutError("who it is was not said in time")
                self._source.settimeout(left)
            if not (more := self._source.recv(65536)):
                return b""
            self._held += more
        if not 0 <= end <= most:
            raise ValueError(f"a line of more than {most} bytes")
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        return line


def _challenge() -> bytes:
    return secrets.token_hex(16).encode()


def _proof(secret: bytes, who: bytes, controllers: bytes, agents: bytes) -> bytes:
    """What `who` says of both challenges; the other end says something else, so no echo is one."""
    said = b" ".join((who, controllers, agents))
    return hmac.new(secret, said, "sha256").hexdigest().encode()
