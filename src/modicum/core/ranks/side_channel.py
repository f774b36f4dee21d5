"""A controller that agents of several hosts reach next to the links on which training travels.

Whoever connects proves that it knows the secret, which itself does not travel: it answers a random
challenge by its HMAC. Then an agent sends reports, a line each, of ranks that are its own, and the
controller sends events, the same to all. What is not of that form ends the connection; nothing is
encrypted. Nobody waits for an end that does not read, as when a cable is pulled: that must be said.
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

from modicum.core.ranks.rank_reports import MOST_BYTES, RankReport, parse_reports, report_line

HANDSHAKE_SECONDS = 10.0
FLUSH_SECONDS = 3.0
MOST_EVENT_BYTES = 1 << 14
# The event after which a controller that falls silent surprises nobody: its own ranks have ended.
OVER: dict[str, Any] = {"over": True}
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
        self._lock = threading.Lock()
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
        with self._lock:
            open_ones = [self._listener, *self._agents]
        for one in open_ones:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                agent, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(agent,), daemon=True).start()

    def _serve(self, agent: socket.socket) -> None:
        try:
            agent.settimeout(HANDSHAKE_SECONDS)
            challenge = secrets.token_hex(16)
            agent.sendall(challenge.encode() + b"\n")
            lines = _Lines(agent, MOST_BYTES)
            if not hmac.compare_digest(lines.next(), _answer(self._secret, challenge)):
                raise ValueError("who connected does not know the secret")
            ranks = _ranks(lines.next(), self._size)
            agent.settimeout(None)
            with self._lock:
                if any(ranks & others for others, _ in self._agents.values()):
                    raise ValueError("ranks that another agent has")
                self._agents[agent] = ranks, _Outbox(agent)
            while line := lines.next():
                reports = parse_reports(line, self._size)
                if {report.rank for report in reports} - ranks:
                    raise ValueError("a rank of another host")
                self._reports.put(reports)
        except (OSError, ValueError) as error:
            self.refused = [*self.refused[-99:], str(error)]
        finally:
            with self._lock:
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
    """

    def __init__(self, host: str, port: int, secret: str, ranks: Collection[int]) -> None:
        self._socket = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
        self._lines = _Lines(self._socket, MOST_EVENT_BYTES)
        challenge = self._lines.next().decode("ascii", "replace")
        self._socket.sendall(_answer(secret.encode(), challenge) + b"\n")
        self._socket.sendall(json.dumps(sorted(ranks)).encode() + b"\n")
        self._socket.settimeout(None)
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

    def _listen(self) -> None:
        with suppress(OSError, ValueError):
            while line := self._lines.next():
                event = json.loads(line)
                self.heard = time.monotonic()
                if event == OVER:
                    self.over = True
                elif isinstance(event, dict) and event:
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
    """Lines of a socket, none longer than `most`; an empty one when it has ended."""

    def __init__(self, source: socket.socket, most: int) -> None:
        self._source, self._most, self._held = source, most, bytearray()

    def next(self) -> bytes:
        while (end := self._held.find(b"\n")) < 0:
            if len(self._held) > self._most:
                raise ValueError(f"a line of more than {self._most} bytes")
            if not (more := self._source.recv(65536)):
                return b""
            self._held += more
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        return line


def _answer(secret: bytes, challenge: str) -> bytes:
    return hmac.new(secret, challenge.encode(), "sha256").hexdigest().encode()


def _ranks(line: bytes, size: int) -> set[int]:
    given = json.loads(line)
    if not isinstance(given, list) or not given or len(given) > size:
        raise ValueError("no list of ranks")
    if not all(type(rank) is int and 0 <= rank < size for rank in given):
        raise ValueError("a rank that there is not")
    return set(given)
