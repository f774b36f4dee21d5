"""What stands between the endpoint and an engine: requests for tokens, and what becomes of them.

The front knows text, an engine knows tokens. Engines to come keep this interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

EndReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenRequest:
    """Tokens that are wanted: what an engine makes of it depends on nothing else.

    Args:
        id: unique among the requests that an engine has.
        prompt: the tokens to continue, fewer than the model's context and at least one.
        max_tokens: at most so many follow.
        adapter: the name of the adapter that is active; None: the base model.
        temperature: 0 takes the most likely token every time.
        top_p: draws among the likeliest tokens that together reach this probability.
        seed: of the draws; None draws one.
        ends: tokens that end the text, and are not given out.
        likeliest: how many likely tokens are given out at each place, with log-probabilities; 0:
            that of the token alone; None: none is computed.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    adapter: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ends: frozenset[int] = frozenset()
    likeliest: int | None = None


@dataclass(frozen=True)
class MadeToken:
    """A token that was made.

    Args:
        log_probability: the natural logarithm of what the model gives it, at temperature 1.
        likeliest: the most likely tokens at its place, with theirs.
    """

    token: int
    log_probability: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Ended:
    """A request has all its tokens: the model ended its text, or a limit was reached."""

    reason: EndReason


@dataclass(frozen=True)
class Failed:
    """A request cannot be continued; others are."""

    error: Exception


EngineEvent = MadeToken | Ended | Failed


class TokenEngine(Protocol):
    """Owns a model and makes tokens for several requests; one thread calls it."""

    def submit(self, request: TokenRequest) -> None:
        """Take a request; what becomes of it comes from `step`."""

    def cancel(self, request_id: str) -> None:
        """Forget a request, if it is there; nothing more comes of it."""

    def step(self) -> Iterator[tuple[str, EngineEvent]]:
        """Make some tokens: pairs of a request's id and what happened to it.

        A request's last event is `Ended` or `Failed`. What goes wrong in one request is its own.
        """

    @property
    def requests(self) -> int:
        """How many requests are not at their end."""
