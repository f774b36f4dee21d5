"""Gradients that travel in buckets while the backward pass runs: what such strategies share.

PyTorch's DistributedDataParallel rebuilds its buckets after the first step it sees, so a run that
was resumed sums in another order than one that was not. Here the buckets are a function of the
parameters alone, and a run of any number of ranks resumes to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from modicum.core.clock import WIRE
from modicum.core.contracts.parameters import trainable
from modicum.core.contracts.state import StateRegistry, View
from modicum.core.contracts.strategy import Ready, Strategy, came_late
from modicum.core.errors import InputError
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.ranks import Ranks


class Bucket(ABC):
    """Parameters of one dtype whose gradients travel together.

    Attributes:
        trained: what has the sums as its gradients when the bucket has landed.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.trained: Sequence[nn.Parameter] = self.parameters
        self._filled: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every gradient is in."""
        return len(self._filled) == len(self.parameters)

    def took(self, index: int) -> bool:
        """Whether a parameter's gradient was put elsewhere, where another would replace it."""
        return False

    def fill(self, index: int) -> None:
        """Move a parameter's gradient to its place."""
        self._put(index)
        self._filled.add(index)

    def fill_left(self) -> None:
        """Move the gradients that the last backward pass did not touch."""
        for index, parameter in enumerate(self.parameters):
            if index not in self._filled and parameter.grad is not None:
                self.fill(index)

    @abstractmethod
    def _put(self, index: int) -> None:
        """Move a parameter's gradient, which is there, to its place."""

    @abstractmethod
    def launch(self) -> None:
        """Begin to sum over the ranks."""

    @abstractmethod
    def land(self) -> None:
        """Wait for the sum, give out gradients, and `clear`."""

    def clear(self) -> None:
        """Forget the update."""
        self._filled.clear()


B = TypeVar("B", bound=Bucket)


class Bucketed(Strategy, Generic[B]):
    """A strategy whose gradients are summed in buckets, in the last backward pass of an update.

    Buckets are launched in their own order, whatever order gradients come in, so that all ranks
    issue the same calls.

    Args:
        bucket_bytes: a bucket is closed when it holds at least so much.
        matrices: sums the gradients of a bucket its own way; None: as the numbers they are.

    What such an exchange leaves unsent is committed with the update that it belongs to.
    """

    def __init__(
        self,
        ranks: Ranks,
        layout: Layout,
        bucket_bytes: int,
        matrices: MatrixExchange | None = None,
    ) -> None:
        super().__init__(ranks, layout)
        self.bucket_bytes, self.buckets, self.matrices = bucket_bytes, list[B](), matrices
        self._next = self._landed = 0
        self._begun = False  # whether this update has had a backward pass
        self._handlers: list[Ready] = []

    def start(self, model: nn.Module) -> None:
        """Give all ranks rank 0's weights, and listen for gradients.

        Raises:
            InputError: as `meet`; or an exchange does not take a parameter.
        """
        if self.matrices is not None:
            self.matrices.connect()
        self.meet(model, bucket_bytes=self.bucket_bytes)
        if self.matrices is not None:
            self.matrices.check(trainable(model))
        names = {id(parameter): name for name, parameter in trainable(model)}
        for group in cut([p for _, p in trainable(model)], self.bucket_bytes):
            bucket = self._bucket(group, [names[id(parameter)] for parameter in group])
            for index, parameter in enumerate(bucket.parameters):
                ready = partial(self._ready, len(self.buckets), index, names[id(parameter)])
                parameter.register_post_accumulate_grad_hook(ready)
            self.buckets.append(bucket)

    @abstractmethod
    def _bucket(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> B:
        """The next bucket, of parameters of these names."""

    def register(self, registry: StateRegistry, model: nn.Module) -> None:
        """Register the weights, and what an exchange of gradients owes."""
        super().register(registry, model)
        for view in self._matrix_views():
            registry.add_view(view)

    def _matrix_views(self) -> list[View]:
        return [] if self.matrices is None else self.matrices.views()

    def when_ready(self, model: nn.Module, handler: Ready) -> None:
        """Tell of a bucket's gradients once the next bucket is on its way.

        Raises:
            InputError: an exchange owes what it leaves of gradients.
        """
        if self.matrices is not None and self.matrices.stateful:
            raise InputError(
                "what an exchange leaves unsent of a gradient is owed once its update is made, so "
                "updates cannot be made in the backward pass",
                field="comm.method",
            )
        self._handlers.append(handler)

    def before_backward(self, *, last: bool) -> None:
        """Sum in the last backward pass of an update only: those before it add up here."""
        super().before_backward(last=last)
        self._begin()

    def _begin(self) -> None:
        self._begun, self._next, self._landed = True, 0, 0
        if self.matrices is not None:
            self.matrices.discard()  # of an update that was interrupted
        for bucket in self.buckets:
            bucket.clear()

    def after_backward(self) -> None:
        """Launch what is left, and wait for all sums.

        A rank that had no pass in this update sends what gradients it has, or none.
        """
        if not self._begun:
            self._begin()
        for bucket in self.buckets[self._next :]:
            bucket.fill_left()
            self._launch()
        if self.matrices is not None:
            with self.ranks.clock(WIRE):
                self.matrices.turn()
        self._land(len(self.buckets))
        self._begun = False
        super().after_backward()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights; only now is it owed what was left of the gradients."""
        super().update(optimizer)
        if self.matrices is not None:
            self.matrices.commit()

    def discard(self) -> None:
        """Forget the gradients; what is owed stays as it was."""
        super().discard()
        if self.matrices is not None:
            self.matrices.discard()

    def _ready(self, number: int, index: int, name: str, parameter: Tensor) -> None:
        if not self._last:
            return
        bucket = self.buckets[number]
        if number < self._next or bucket.took(index):
            raise came_late(name)
        bucket.fill(index)
        while self._next < len(self.buckets) and self.buckets[self._next].complete:
            self._launch()

    def _launch(self) -> None:
        """Send a bucket; then the one before it has had its time on the wire."""
        self.buckets[self._next].launch()
        self._next += 1
        if self._lands_early:
            self._land(self._next - 1)

    @property
    def _lands_early(self) -> bool:
        """Whether somebody waits for gradients, or for their memory, during the backward pass."""
        return bool(self._handlers)

    def _land(self, end: int) -> None:
        """Wait for the sums of the buckets before number `end`, and tell of their gradients."""
        for bucket in self.buckets[self._landed : end]:
            with self.ranks.clock(WIRE):
                bucket.land()
            self._landed += 1
            for handler in self._handlers:
                for tensor in bucket.trained:
                    if tensor.grad is not None:
                        handler(tensor)


def cut(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in the order in which gradients come, last layer first, in groups of one dtype.

    >>> import torch
    >>> sizes = [nn.Parameter(torch.ones(n)) for n in (100, 30, 30)]
    >>> [[p.numel() for p in group] for group in cut(sizes, 200)]
    [[30, 30], [100]]
    """
    groups: list[list[nn.Parameter]] = []
    size, kind = 0, None
    for parameter in reversed(parameters):
        if not groups or size >= bucket_bytes or kind != (parameter.dtype, parameter.device):
            groups.append([])
            size, kind = 0, (parameter.dtype, parameter.device)
        groups[-1].append(parameter)
        size += parameter.nbytes
    return groups
