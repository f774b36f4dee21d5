"""The server behind `modicum watch`: two addresses, both for reading.

A page of a stranger that has its name resolve to this machine (DNS rebinding) asks with that name,
and is refused: a request must name an address by number, `localhost`, or this machine.
"""

from __future__ import annotations

import ipaddress
import math
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.report.watch.followed import FollowedRuns

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def watch(
    folders: Sequence[Path],
    host: str = "127.0.0.1",
    port: int = 8321,
    ready: Callable[[str], None] = print,
) -> None:
    """Serve the page of runs, live, until Ctrl-C.

    Args:
        folders: run folders; they are only read.
        host: the address to listen at: of this machine alone, by default.
        port: 0 for any that is free.
        ready: called with the page's address once it can be asked for.

    Raises:
        InputError: a folder is no run's, the address cannot be listened at, or Starlette, uvicorn
            or jinja2 is not installed.
    """
    uvicorn = library("uvicorn", "watch", "modicum watch")
    library("jinja2", "cli", "modicum watch")
    app = application(FollowedRuns(folders))
    with _listening(host, port) as listener:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        ready(f"http://{_spelled(host)}:{listener.getsockname()[1]}/")
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            return


def _spelled(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen at port {port} of {host} ({problem}); give another by --port "
            "(0: any that is free)"
        ) from None


def application(runs: FollowedRuns) -> Starlette:
    """The two addresses: the page, and what is new for its curves.

    Raises:
        InputError: Starlette is not installed.
    """
    library("starlette", "watch", "modicum watch")
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route

    def page(request: Request) -> Response:
        return HTMLResponse(runs.page(), headers=_HEADERS)

    def curves(request: Request) -> Response:
        asked = request.query_params
        if asked.get("version") == runs.version():
            return Response(status_code=204, headers=_HEADERS)
        low, high = _number(asked.get("low"), -math.inf), _number(asked.get("high"), math.inf)
        _, answer = runs.curves(low, high)
        return Response(answer, media_type="application/json", headers=_HEADERS)

    routes = [Route("/", page), Route("/curves", curves)]
    app = Starlette(routes=routes)
    app.add_middleware(_KnownHosts)
    return app


def _number(text: str | None, otherwise: float) -> float:
    """A bound of a stretch; whatever is none means no bound."""
    try:
        value = float(text) if text is not None else otherwise
    except ValueError:
        return otherwise
    return otherwise if math.isnan(value) else value


class _KnownHosts:
    """Refuses requests by another name than this machine's."""

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
