"""One request's choices: its prompts as tokens, and the text that becomes of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

from modicum.core.errors import InputError
from modicum.core.random import derive_seed
from modicum.serve.api_error import ApiError
from modicum.serve.asked import AskedAnswer, AskedBody, AskedText, Prompt
from modicum.serve.engine_thread import EngineThread
from modicum.serve.served_models import ServedModel, ServedModels
from modicum.serve.text_stream import REPLACEMENT, TextStream
from modicum.serve.tokens import EndReason, EngineEvent, Failed, MadeToken, TokenRequest


class GenerationFailed(Exception):
    """The engine could not continue a request; its cause says why."""


@dataclass(frozen=True)
class ShownToken:
    """A token with its log-probability, as an answer shows it; `offset` is its first character."""

    text: str
    offset: int
    log_probability: float
    likeliest: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ChoicePiece:
    """What comes next in one choice."""

    index: int
    text: str
    tokens: tuple[ShownToken, ...] = ()
    reason: EndReason | None = None


def token_requests(
    served: ServedModels, asked: AskedBody, default_tokens: int
) -> list[TokenRequest]:
    """What an engine is to make: n choices of each prompt, in the order of their indices.

    The first choice of a seed is the one that there would be alone.

    Raises:
        ApiError: no such model; it has no template; or a prompt is empty or too long.
    """
    model = _named(served, asked.model)
    made = []
    for prompt in _prompts(served, model, asked):
        for number in range(asked.n):
            seed = asked.seed
            if seed is not None and number:
                seed = derive_seed(seed % 2**63, "choice", number)
            made.append(
                TokenRequest(
                    id=secrets.token_hex(8),
                    prompt=prompt,
                    max_tokens=asked.most_tokens or default_tokens,
                    adapter=model.adapter,
                    temperature=asked.temperature,
                    top_p=asked.top_p,
                    seed=seed,
                    ends=served.ends | model.ends,
                    likeliest=asked.likeliest,
                )
            )
    return made


def _named(served: ServedModels, name: str) -> ServedModel:
    if name not in served.names:
        said = InputError(
            "there is no such model",
            field="model",
            value=name,
            allowed=", ".join(served.names),
            candidates=served.names,
        )
        raise ApiError(404, str(said), "model", "model_not_found")
    return served.names[name]


def _prompts(served: ServedModels, model: ServedModel, asked: AskedBody) -> list[tuple[int, ...]]:
    field_name, found = "prompt", list[tuple[int, ...]]()
    if isinstance(asked, AskedText):
        found = [_tokens(served, prompt) for prompt in asked.prompt]
    else:
        field_name, turns = "messages", cast(AskedAnswer, asked).messages
        if model.template is None:
            problem = "this model has no chat template; ask /v1/completions to continue a text"
            raise ApiError(400, problem, "model", "no_chat_template")
        try:
            text = model.template.render([turn.model_dump() for turn in turns], generation=True)
        except InputError as error:
            raise ApiError(400, str(error), "messages", "invalid_value") from None
        ((encoded, _),) = served.tokenizer.encode_marked([text], [()])
        found = [tuple(encoded)]
    for ids in found:
        if not ids:
            raise ApiError(400, "there is no token to continue", field_name, "invalid_value")
        if len(ids) >= served.context:
            problem = (
                f"the prompt's {len(ids)} tokens fill the model's context of {served.context} "
                "tokens; shorten it"
            )
            raise ApiError(400, problem, field_name, "context_length_exceeded")
    return found


def _tokens(served: ServedModels, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(served.tokenizer.encode_prompt(prompt))
    if any(not 0 <= token < served.vocabulary_size for token in prompt):
        problem = f"token ids are 0 to {served.vocabulary_size - 1} here"
        raise ApiError(400, problem, "prompt", "invalid_value")
    return prompt


@dataclass
class Choices:
    """The choices of a request while they are made.

    Args:
        continues: whether they are parts of the prompt's text, and no answers to it.

    Attributes:
        completion_tokens: how many tokens were made so far.
    """

    served: ServedModels
    requests: Sequence[TokenRequest]
    stops: Sequence[str] = ()
    continues: bool = False
    completion_tokens: int = field(default=0, init=False)

    async def pieces(self, thread: EngineThread) -> AsyncGenerator[ChoicePiece]:
        """What comes of all choices, as it comes. Close it, and nothing more is made.

        Raises:
            EngineBusy: there is no room for them.
            EngineClosed: the server takes no more requests.
            GenerationFailed: a choice cannot be continued.
        """
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[tuple[str, EngineEvent]]()
        waiting = {
            request.id: _Choice(
                index, self.served, self.stops, request.prompt if self.continues else ()
            )
            for index, request in enumerate(self.requests)
        }

        def listen(name: str, event: EngineEvent) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody listens any more
                loop.call_soon_threadsafe(heard.put_nowait, (name, event))

        thread.submit(self.requests, listen)
        try:
            while waiting:
                name, event = await heard.get()
                if name not in waiting:
                    continue  # it came to a stop string
                if isinstance(event, Failed):
                    raise GenerationFailed from event.error
                self.completion_tokens += isinstance(event, MadeToken)
                piece = waiting[name].take(event)
                if piece.reason is not None:
                    del waiting[name]
                    thread.cancel([name])
                if piece.text or piece.tokens or piece.reason:
                    yield piece
        finally:
            thread.cancel(waiting)


class _Choice:
    """One choice between two of its tokens."""

    def __init__(
        self, index: int, served: ServedModels, stops: Sequence[str], after: Sequence[int] = ()
    ) -> None:
        self._index, self._tokenizer = index, served.tokenizer
        self._stream = TextStream(served.tokenizer, stops, after)
        self._given = 0
        self._held: list[ShownToken] = []

    def take(self, event: EngineEvent) -> ChoicePiece:
        """What an event adds to the text that can be shown."""
        reason: EndReason | None = None
        if isinstance(event, MadeToken):
            begun, unfinished = self._stream.length, self._stream.unfinished
            text = self._stream.add(event.token)
            if event.log_probability is not None:
                token = self._shown(event, event.log_probability, begun)
                if unfinished and REPLACEMENT not in token.text:
                    # What was no character is shown before it, and was not counted yet.
                    after = max(begun, self._stream.length - len(token.text))
                    token = replace(token, offset=after)
                self._held.append(token)
        else:
            text, reason = self._stream.finish(), getattr(event, "reason", "stop")
        self._given += len(text)
        if self._stream.stopped:
            reason = "stop"
        # A token is shown with its first character; after the end there are tokens without any.
        last = reason is not None and not self._stream.stopped
        tokens = tuple(each for each in self._held if last or each.offset < self._given)
        self._held = self._held[len(tokens) :]
        return ChoicePiece(self._index, text, tokens, reason)

    def _shown(self, event: MadeToken, log_probability: float, offset: int) -> ShownToken:
        likeliest = tuple((self._spelled(token), value) for token, value in event.likeliest)
        return ShownToken(self._spelled(event.token), offset, log_probability, likeliest)

    def _spelled(self, token: int) -> str:
        """The text of a token after another one: some decoders drop a blank that begins a text."""
        alone, twice = (
            self._tokenizer.decode([token] * times, skip_special_tokens=False) for times in (1, 2)
        )
        # What is no character alone may be one twice, and some decoders show what is repeated once.
        if REPLACEMENT in twice or not twice.startswith(alone):
            return alone
        return twice[len(alone) :] or alone
