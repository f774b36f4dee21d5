"""What servers on this machine share: where they listen, and by which names they may be asked.

A page of a stranger that has its name resolve to this machine (DNS rebinding) asks with that name,
and is refused: a request must name an address by number, `localhost`, or this machine.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from modicum.core.errors import InputError


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0: at any that is free.

    Raises:
        InputError: nothing can listen there, as the port is in use or the address is another's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0
        problem = f"port {port} of {host} is taken"
        if number != errno.EADDRINUSE:
            said = getattr(error, "strerror", None) or str(error)
            # The system's own words: `create_server` adds the address to them.
            why = os.strerror(number) if number in errno.errorcode else said
            problem = f"cannot listen at port {port} of {host} ({why})"
        raise InputError(f"{problem}; give another with --port (0: any that is free)") from None


def address(host: str, listener: socket.socket) -> str:
    """The address at which a browser finds what listens: `http://127.0.0.1:8321`."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Whether an address to listen at is this machine's alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def known_host(header: str) -> bool:
    """Whether a request's `Host` is an address by number, localhost, or this machine's name.

    >>> known_host("127.0.0.1:8321"), known_host("[::1]:80"), known_host("evil.example")
    (True, True, False)
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:  # a bracket that is not closed
        return False
    if name in ("localhost", socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class KnownHosts:
    """An ASGI application that refuses requests by another name than this machine's."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        given = dict(scope.get("headers", ())).get(b"host", b"").decode("latin-1")
        if scope["type"] == "http" and not known_host(given):
            refusal = PlainTextResponse("this server does not go by that name\n", 421)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def announcing(uvicorn: Any, ready: Callable[[], object]) -> Any:
    """uvicorn's class of servers, which calls `ready` once it hears requests and signals.

    If people knew of it before, they could press Ctrl-C when nothing hears it.
    """

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            ready()

    return Announcing
