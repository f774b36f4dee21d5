"""The server behind `modicum serve`: it listens, and ends without leaving anybody waiting."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.core.local_server import announcing, is_loopback
from modicum.serve.engine_thread import EngineThread
from modicum.serve.in_turns import InTurns
from modicum.serve.served_models import ServedModels


def check_host(host: str, *, public: bool, api_key: str | None) -> None:
    """Make sure that an endpoint is open to a network only where that was said, and with a key.

    Raises:
        InputError: it is not so; or the key is no key.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
        raise InputError("a key is printable ASCII, and not empty", field="--api-key")
    if is_loopback(host):
        return
    if not public:
        raise InputError(
            "at this address other machines can ask the model; say --public if that is meant",
            field="--host",
            value=host,
        )
    if api_key is None:
        raise InputError(
            "an endpoint that other machines can ask needs a key: --api-key, or MODICUM_API_KEY",
            field="--host",
            value=host,
        )


def serve(
    served: ServedModels,
    listener: socket.socket,
    *,
    at_once: int = 4,
    queue: int = 32,
    default_tokens: int = 512,
    api_key: str | None = None,
    ready: Callable[[], object] = lambda: None,
) -> None:
    """Answer requests until Ctrl-C.

    Args:
        listener: from `core.local_server.listening`.
        at_once: so many choices are made in turns.
        queue: so many more wait; others are asked to come again.
        default_tokens: of an answer in a conversation, where the request says no limit.
        api_key: what requests must name; None: they need not.
        ready: called once the endpoint can be asked.

    Raises:
        InputError: Starlette or uvicorn is not installed.
    """
    uvicorn = library("uvicorn", "serve", "modicum serve")
    library("starlette", "serve", "modicum serve")
    from modicum.serve.endpoint import Endpoint

    thread = EngineThread(
        InTurns(served.model, served.adapters, at_once=at_once), room=at_once + queue
    )
    endpoint = Endpoint(served, thread, default_tokens=default_tokens, api_key=api_key)
    config = uvicorn.Config(
        endpoint.application(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    try:
        _ending(uvicorn, thread, ready)(config).run(sockets=[listener])
    except KeyboardInterrupt:
        return
    finally:
        thread.close()


def _ending(uvicorn: Any, thread: EngineThread, ready: Callable[[], object]) -> Any:
    """uvicorn's server, which ends open answers before it waits for their ends."""

    class Ending(announcing(uvicorn, ready)):  # type: ignore[misc]
        async def shutdown(self, sockets: Any = None) -> None:
            thread.close(wait=0)
            await super().shutdown(sockets)

    return Ending
