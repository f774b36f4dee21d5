"""Events of a run: what the trainer publishes and methods, meters and terminals subscribe to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal

Event = Literal[
    "before_update",  # step: all micro-batches are at hand
    "gradients_ready",  # step: gradients are summed over micro-batches (and ranks), not clipped
    "before_optimizer",  # step: gradients are clipped
    "after_optimizer",  # step: weights are new
    "before_evaluation",  # step: whoever defers updates must flush
    "before_checkpoint",  # step: likewise
]
Handler = Callable[..., None]


class Events:
    """A list of handlers an event, called in the order of subscription.

    >>> events, seen = Events(), []
    >>> unsubscribe = events.on("after_optimizer", lambda step: seen.append(step))
    >>> events.publish("after_optimizer", step=3)
    >>> unsubscribe()
    >>> events.publish("after_optimizer", step=4)
    >>> seen
    [3]
    """

    def __init__(self) -> None:
        self._handlers: dict[str, list[Handler]] = defaultdict(list)

    def on(self, event: Event, handler: Handler) -> Callable[[], None]:
        """Subscribe; the returned function ends the subscription."""
        self._handlers[event].append(handler)
        return lambda: self._handlers[event].remove(handler)

    def publish(self, event: Event, **payload: Any) -> None:
        """Call every handler of `event` with the payload as keywords."""
        for handler in list(self._handlers[event]):
            handler(**payload)
