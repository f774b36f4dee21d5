"""The server behind `modicum watch`: two addresses, both for reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modicum.core.extras import library
from modicum.core.local_server import KnownHosts, address, announcing, listening
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
    with listening(host, port) as listener:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        try:
            server = announcing(uvicorn, lambda: ready(f"{address(host, listener)}/"))(config)
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return


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
    app.add_middleware(KnownHosts)
    return app


def _number(text: str | None, otherwise: float) -> float:
    """A bound of a stretch; whatever is none means no bound."""
    try:
        value = float(text) if text is not None else otherwise
    except ValueError:
        return otherwise
    return otherwise if math.isnan(value) else value
