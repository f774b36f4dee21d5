"""Answers in the shapes of OpenAI's reference, of both endpoints, in one or as a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from modicum.serve.choices import ChoicePiece, ShownToken
from modicum.serve.text_stream import REPLACEMENT


def usage(prompt: int, made: int) -> dict[str, int]:
    """The count of tokens of an answer."""
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def event(value: Any) -> bytes:
    """A server-sent event.

    >>> event("[DONE]")
    b'data: [DONE]\\n\\n'
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


@dataclass(frozen=True)
class AnswerShape:
    """How the pieces of one request are written.

    Args:
        model: the name that was asked for.
        chat: whether they answer a conversation.
        shows_tokens: whether there are log-probabilities.
    """

    model: str
    chat: bool
    shows_tokens: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def in_one(self, pieces: Sequence[ChoicePiece], counts: dict[str, int]) -> dict[str, Any]:
        """All of the answer."""
        choices = []
        for index in range(max(piece.index for piece in pieces) + 1):
            own = [piece for piece in pieces if piece.index == index]
            text = "".join(piece.text for piece in own)
            tokens = [token for piece in own for token in piece.tokens]
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(
                {
                    "index": index,
                    **(said if self.chat else {"text": text}),
                    "logprobs": self._tokens(tokens),
                    "finish_reason": own[-1].reason,
                }
            )
        return self._around(choices, "chat.completion") | {"usage": counts}

    def first(self, index: int) -> dict[str, Any]:
        """What begins a choice in a stream of a conversation."""
        return self._chunk(index, {"role": "assistant", "content": ""}, "", [], None)

    def next(self, piece: ChoicePiece) -> dict[str, Any]:
        """A piece in a stream."""
        delta = {"content": piece.text} if piece.text or piece.tokens else {}
        return self._chunk(piece.index, delta, piece.text, piece.tokens, piece.reason)

    def last(self, counts: dict[str, int]) -> dict[str, Any]:
        """The count of tokens, at the end of a stream."""
        return self._around([], "chat.completion.chunk") | {"usage": counts}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        text: str,
        tokens: Sequence[ShownToken],
        reason: str | None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            **({"delta": delta} if self.chat else {"text": text}),
            "logprobs": self._tokens(tokens) if tokens else None,
            "finish_reason": reason,
        }
        return self._around([choice], "chat.completion.chunk")

    def _around(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _tokens(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if not self.shows_tokens:
            return None
        if not self.chat:
            return {
                "tokens": [token.text for token in tokens],
                "token_logprobs": [token.log_probability for token in tokens],
                "top_logprobs": [_by_name(token.likeliest) for token in tokens],
                "text_offset": [token.offset for token in tokens],
            }
        content = [
            {
                **_spelled(token.text, token.log_probability),
                "top_logprobs": [_spelled(text, value) for text, value in token.likeliest],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _by_name(likeliest: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Log-probabilities by the tokens' texts; of tokens of one text that of the likeliest.

    Args:
        likeliest: tokens, the most likely first.
    """
    found: dict[str, float] = {}
    for text, value in likeliest:
        found.setdefault(text, value)
    return found


def _spelled(text: str, log_probability: float) -> dict[str, Any]:
    """A token; where it is a part of a character its bytes are not said."""
    known = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": log_probability, "bytes": known}
