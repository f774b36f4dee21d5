"""The addresses of `modicum serve`: OpenAI's, answered by an engine."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from modicum.core.errors import InputError
from modicum.core.local_server import KnownHosts
from modicum.serve.answers import AnswerShape, event, usage
from modicum.serve.api_error import ApiError
from modicum.serve.asked import AskedAnswer, AskedBody, AskedText, parse
from modicum.serve.choices import Choices, GenerationFailed, token_requests
from modicum.serve.engine_thread import EngineBusy, EngineClosed, EngineThread
from modicum.serve.served_models import ServedModels

Answer = TypeVar("Answer")
Handler = Callable[[Request], Awaitable[Response]]
log = logging.getLogger(__name__)
_READING = 30.0  # seconds for a body to arrive


class Endpoint:
    """Answers requests for text of the served models.

    Args:
        thread: the engine that makes the tokens; whoever made it closes it.
        default_tokens: of an answer in a conversation, where the request says no limit.
        api_key: what requests must name; None: they need not.
        most_bytes: of a request's body.
    """

    def __init__(
        self,
        served: ServedModels,
        thread: EngineThread,
        *,
        default_tokens: int = 512,
        api_key: str | None = None,
        most_bytes: int = 4 << 20,
    ) -> None:
        self._served, self._thread = served, thread
        self._default_tokens, self._most_bytes = default_tokens, most_bytes
        self._key = api_key.encode() if api_key is not None else None
        self._started = int(time.time())

    def application(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/models", self._answered(self._models)),
            Route("/v1/models/{name:path}", self._answered(self._model)),
            Route("/v1/chat/completions", self._answered(self._chat), methods=["POST"]),
            Route("/v1/completions", self._answered(self._text), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_page})
        app.add_middleware(KnownHosts)
        return app

    # The addresses

    async def _models(self, request: Request) -> Response:
        data = [self._described(name) for name in self._served.names]
        return JSONResponse({"object": "list", "data": data})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._served.names:
            raise ApiError(404, "there is no such model", "model", "model_not_found")
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "modicum"}

    async def _chat(self, request: Request) -> Response:
        return await self._complete(request, AskedAnswer)

    async def _text(self, request: Request) -> Response:
        return await self._complete(request, AskedText)

    async def _complete(self, request: Request, kind: type[AskedBody]) -> Response:
        asked = parse(await self._body(request), kind)
        # Before prompts become tokens: a body of some megabytes can ask for millions of choices.
        if asked.choices > self._thread.room:
            problem = f"these are {asked.choices} choices, and {self._thread.room} are allowed"
            raise ApiError(400, problem, "n", "invalid_value")
        # Long prompts take a while to become tokens, and others must not wait for it.
        requests = await asyncio.to_thread(
            token_requests, self._served, asked, self._default_tokens
        )
        choices = Choices(self._served, requests, asked.stop, continues=kind is AskedText)
        shape = AnswerShape(
            asked.model, chat=kind is AskedAnswer, shows_tokens=asked.likeliest is not None
        )
        if asked.stream:
            counted = asked.stream_options is not None and asked.stream_options.include_usage
            self._thread.check_room(len(requests))
            return _Events(self._events(choices, shape, asked.n, counted))
        return JSONResponse(await _unless_gone(request, self._in_one(choices, shape, asked.n)))

    async def _in_one(self, choices: Choices, shape: AnswerShape, n: int) -> dict[str, Any]:
        async with aclosing(choices.pieces(self._thread)) as pieces:
            found = [piece async for piece in pieces]
        return shape.in_one(found, _counts(choices, n))

    async def _events(
        self, choices: Choices, shape: AnswerShape, n: int, counted: bool
    ) -> AsyncGenerator[bytes]:
        """An answer as it comes; what goes wrong is its last event."""
        try:
            if shape.chat:
                for index in range(len(choices.requests)):
                    yield event(shape.first(index))
            async with aclosing(choices.pieces(self._thread)) as pieces:
                async for piece in pieces:
                    yield event(shape.next(piece))
            if counted:
                yield event(shape.last(_counts(choices, n)))
            yield event("[DONE]")
        except Exception as error:
            yield event(_refusal(error).as_json())

    # What every request goes through

    def _answered(self, handler: Handler) -> Handler:
        """The handler, with errors as OpenAI's clients read them."""

        async def answer(request: Request) -> Response:
            try:
                self._admit(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                said = _refusal(error)
                return JSONResponse(said.as_json(), said.status, said.headers)

        return answer

    def _admit(self, request: Request) -> None:
        """Refuse pages of other servers, and requests without the key."""
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise ApiError(403, "pages of other servers may not ask", code="foreign_origin")
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self._key is not None and not hmac.compare_digest(given, self._key):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the content type must be application/json", code="content_type")
        body = bytearray()
        try:
            async with asyncio.timeout(_READING):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._most_bytes:
                        problem = f"the body is longer than {self._most_bytes} bytes"
                        raise ApiError(413, problem, code="body_too_large")
        except TimeoutError:
            raise ApiError(408, "the body did not arrive", code="timeout") from None
        return bytes(body)


class _Events(StreamingResponse):
    """A stream of events, closed at once when nobody reads it any more."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """What comes of some work, which ends when the client goes.

    Raises:
        ClientDisconnect: it has gone.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def _counts(choices: Choices, n: int) -> dict[str, int]:
    """Tokens of the prompts, each once, and of all choices."""
    prompts = sum(len(request.prompt) for request in choices.requests[::n])
    return usage(prompts, choices.completion_tokens)


def _refusal(error: Exception) -> ApiError:
    """What a client is answered; what is the server's fault is in its log, under an id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineBusy):
        problem = f"there are too many requests now ({error}); ask again in a moment"
        return ApiError(429, problem, code="queue_full", headers={"retry-after": "1"})
    cause = error.__cause__ if isinstance(error, GenerationFailed) else error
    if isinstance(cause, EngineClosed):
        return ApiError(503, str(cause), code="closing", headers={"retry-after": "5"})
    name = secrets.token_hex(6)
    log.error("request %s failed", name, exc_info=cause)
    said = f": {cause}" if isinstance(cause, InputError) else ""
    return ApiError(500, f"the answer failed{said}; the server's log has it as {name}")


def _addresses(routes: Iterable[Any]) -> Iterator[str]:
    """Each address with the method that asks it, as people write them."""
    for route in routes:
        methods = ", ".join(sorted(route.methods - {"HEAD"}))
        yield f"{methods} {route.path.replace('{name:path}', 'NAME')}"


async def _no_such_page(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    there = "; ".join(_addresses(request.app.routes))
    words = {
        404: f"there is no such address; those that there are: {there}",
        405: f"this address is not asked by that method; those that there are: {there}",
    }
    problem = words.get(status, str(error))
    headers = getattr(error, "headers", None)
    return JSONResponse(ApiError(status, problem).as_json(), status, headers)
