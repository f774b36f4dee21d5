"""Transforms that take statistics of layers up every few updates, and may end for good.

From here come the order of an update, the counting of updates, which of them are looked at, and the
end: hooks are off, memory is given back, and gradients stay as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modicum.optim.transform import TransformContext, TransformRuntime


class CurvatureRuntime(TransformRuntime):
    """A transform with statistics of its layers. Subclasses own these, and call `open` once.

    Args:
        every: statistics are taken in every n-th update, the first among them.
        warm_up: and in each of the first so many.

    Attributes:
        updates: how many there were; after the end, how many there were before it.
        ended_because: why the transform has ended; None: it has not.
    """

    def __init__(
        self, context: TransformContext, exclude: Sequence[str], *, every: int, warm_up: int = 0
    ) -> None:
        super().__init__(context, exclude)
        self.every, self.warm_up, self.updates = every, warm_up, 0
        self._loss: float | None = None

    @abstractmethod
    def open(self) -> None:
        """Take memory for the statistics, and set `capture`."""

    @abstractmethod
    def take_up(self, gradient_scale: float) -> None:
        """Take up what this update has shown.

        Args:
            gradient_scale: brings gradients of outputs to those of the mean loss over all ranks.
        """

    @abstractmethod
    def transform(self) -> None:
        """Replace the gradients that are there by others."""

    @abstractmethod
    def forget(self) -> None:
        """Begin the next update's sums."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory of the statistics back."""

    @abstractmethod
    def kept(self) -> dict[str, Any]:
        """What the next updates depend on, by name; what this rank has of it."""

    @abstractmethod
    def put_back(self, state: Mapping[str, Any]) -> None:
        """Take up what `kept` gave, of all ranks; there is `updates` among it.

        Raises:
            InputError: names or shapes are others than this model's.
        """

    def over(self, loss: float | None) -> str | None:
        """Whether the transform ends before this update, and why.

        Args:
            loss: the mean of the update's losses over all ranks, if it is known.
        """
        return None

    def before_update(self, step: int) -> None:
        """Forget what passes have added up that led to no update."""
        if self.ended_because is None:
            self.forget()

    def update_loss(self, loss: float) -> None:
        """The update's mean loss over all ranks."""
        self._loss = loss

    def after_backward(self) -> None:
        """Change the final gradients of an update."""
        loss, self._loss = self._loss, None
        self.apply(loss=loss)

    @torch.no_grad()
    def apply(self, loss_scale: float = 1.0, loss: float | None = None) -> None:
        """Take up what the update has shown and transform; see `TransformRuntime`.

        Args:
            loss: the update's mean loss over all ranks, for methods that follow it.
        """
        if self.ended_because is None and (why := self.over(loss)) is not None:
            self.end(why)
        if self.ended_because is not None:
            return
        if self.capture.wanted:
            shares = self.context.ranks.size if self.context.reduction == "mean" else 1
            self.take_up(1 / (loss_scale * shares))
        self.transform()
        self.forget()
        self._begin(self.updates + 1)

    def end(self, why: str) -> None:
        """Take the hooks off and give memory back: from here on gradients stay as they are."""
        self.ended_because = why
        self.capture.close()
        self.release()

    def _begin(self, update: int) -> None:
        """Begin with the update that so many have gone before."""
        self.updates = update
        self.capture.wanted = update < self.warm_up or update % self.every == 0

    def state_dict(self) -> dict[str, Any]:
        """How many updates there were, and what is kept; of an ended one, why it has ended."""
        if self.ended_because is not None:
            return {"updates": self.updates, "ended": self.ended_because}
        return {"updates": self.updates, **self.kept()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back, of before the end or of after it; see `TransformRuntime`."""
        if "ended" in state:
            if self.ended_because is None:
                self.end(str(state["ended"]))
            self.updates = int(state["updates"])
            return
        if self.ended_because is not None:
            self.ended_because = None
            self.open()
        self.put_back(state)
        self._begin(int(state["updates"]))
