"""The simple engine: every running request makes a token in its turn, each by a call of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from modicum.adapters import AttachedAdapter
from modicum.core.errors import InputError
from modicum.models.decoders import Decoder, config_of
from modicum.models.generate import generate
from modicum.serve.tokens import Ended, EngineEvent, Failed, MadeToken, TokenRequest

LEAST = -9999.0  # what clients read as the logarithm of no probability at all


class InTurns:
    """Makes tokens for a few requests at a time, and lets the others wait in order.

    Each call of the model is for one request, with its own cached keys and values, so a request
    gets the tokens that it would get alone. A request's memory is given back when it ends.

    Args:
        model: in `eval` mode.
        adapters: adapters on the model, by the names that requests use.
        at_once: so many requests hold keys and values at the same time.

    Raises:
        ValueError: `at_once` is not positive.
    """

    def __init__(
        self,
        model: Decoder,
        adapters: Mapping[str, AttachedAdapter] | None = None,
        *,
        at_once: int = 4,
    ) -> None:
        if at_once < 1:
            raise ValueError("at least one request must run at a time")
        self._model, self._adapters, self._at_once = model, dict(adapters or {}), at_once
        self._waiting: deque[TokenRequest] = deque()
        self._running: dict[str, _Running] = {}

    @property
    def requests(self) -> int:
        """How many requests are not at their end."""
        return len(self._waiting) + len(self._running)

    def submit(self, request: TokenRequest) -> None:
        """Let a request wait for its turn."""
        self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """Forget a request, if it is there."""
        self._running.pop(request_id, None)
        self._waiting = deque(each for each in self._waiting if each.id != request_id)

    def step(self) -> Iterator[tuple[str, EngineEvent]]:
        """A token for every running request, those of one adapter after each other."""
        while self._waiting and len(self._running) < self._at_once:
            request = self._waiting.popleft()
            self._running[request.id] = _Running(request)
        for running in sorted(self._running.values(), key=lambda each: each.request.adapter or ""):
            request = running.request
            if self._running.get(request.id) is not running:
                continue  # cancelled since this step began
            try:
                self._use(request.adapter)
                event: EngineEvent = running.next(self._model)
            except Exception as error:  # whatever it is, other requests are not concerned
                event = Failed(error)
            if not isinstance(event, MadeToken):
                self._running.pop(request.id, None)
            yield request.id, event

    def _use(self, name: str | None) -> None:
        """Have one adapter active, or none; who else has the model may have changed that."""
        active = {each for each, adapter in self._adapters.items() if adapter.active}
        if active == ({name} - {None}):
            return
        if name is not None:
            self._adapters[name].activate(alone=True)
        else:
            for adapter in self._adapters.values():
                adapter.deactivate()


class _Running:
    """A request between two of its tokens."""

    def __init__(self, request: TokenRequest) -> None:
        self.request, self._made = request, 0
        self._tokens: Iterator[int] | None = None
        self._last = MadeToken(-1)

    def next(self, model: Decoder) -> EngineEvent:
        """Make one more token."""
        if self._tokens is None:
            self._tokens = self._begin(model)
        token = next(self._tokens, None)
        if token is None:
            room = config_of(model).context - len(self.request.prompt)
            full = self._made == min(self.request.max_tokens, room)
            return Ended("length" if full else "stop")
        self._made += 1
        return MadeToken(token) if self.request.likeliest is None else self._last

    def _begin(self, model: Decoder) -> Iterator[int]:
        request, generator = self.request, torch.Generator()
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.seed)
        device = next(model.parameters()).device
        return generate(
            model,
            torch.tensor([request.prompt], device=device),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            eos_id=request.ends,
            generator=generator,
            drawn=None if request.likeliest is None else self._note,
        )

    def _note(self, logits: Tensor, token: int) -> None:
        """Keep the log-probabilities at a token's place."""
        found = torch.log_softmax(logits.float(), dim=-1)
        if found.isnan().any():
            raise InputError(
                "the model's outputs are no finite numbers: its weights are damaged or diverged"
            )
        found = found.clamp(min=LEAST)
        values, ids = found.topk(min(self.request.likeliest or 0, len(found)))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        self._last = MadeToken(token, float(found[token]), tuple(pairs))
