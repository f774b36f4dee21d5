"""Data parallelism with whole replicas: gradients are summed in buckets while the backward runs.

PyTorch's DistributedDataParallel cuts its buckets anew after the first step it sees, so a run that
was resumed sums in another order than one that was not. Here the buckets are a function of the
parameters alone, and a run of any number of ranks resumes to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.layout import Layout
from modicum.core.parameters import trainable
from modicum.core.ranks import Ranks, peer_errors
from modicum.core.strategy import Ready, Strategy


class Bucket:
    """Parameters of one dtype whose gradients travel together, in one flat tensor.

    Behind the gradients stands one element a parameter, 1 where this rank has a gradient of it: the
    sum tells who was used by no rank at all.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._ends = list(accumulate(p.numel() for p in parameters))
        self._flat: Tensor | None = None
        self._handle: dist.Work | None = None
        self._filled: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every gradient is in."""
        return len(self._filled) == len(self.parameters)

    def fill(self, index: int) -> None:
        """Move a parameter's gradient to its place, of which it becomes a view."""
        parameter, place = self.parameters[index], self._slot(index)
        assert parameter.grad is not None
        place.copy_(parameter.grad)
        parameter.grad = place
        self._flag(index).fill_(1)
        self._filled.add(index)

    def fill_left(self) -> None:
        """Move the gradients that the last backward pass did not touch, and zeros for the rest."""
        for index, parameter in enumerate(self.parameters):
            if index not in self._filled and parameter.grad is not None:
                self.fill(index)
            elif index not in self._filled:
                self._slot(index).zero_()

    def launch(self) -> None:
        """Begin to sum over the ranks."""
        with peer_errors():
            self._handle = dist.all_reduce(self._whole(), async_op=True)

    def land(self) -> None:
        """Wait for the sum, and give gradients to parameters that only other ranks used."""
        assert self._handle is not None
        with peer_errors():
            self._handle.wait()
        for index, parameter in enumerate(self.parameters):
            # Who has a gradient need not ask, which on an accelerator would wait for it.
            if index not in self._filled:
                parameter.grad = self._slot(index) if float(self._flag(index)) else None
        self.clear()

    def clear(self) -> None:
        """Forget the update; gradients are views, and keep the memory as long as they live."""
        self._flat, self._handle = None, None
        self._filled.clear()

    def _whole(self) -> Tensor:
        if self._flat is None:
            first, count = self.parameters[0], len(self.parameters)
            size = self._ends[-1] + count
            self._flat = torch.empty(size, dtype=first.dtype, device=first.device)
            self._flat[-count:] = 0
        return self._flat

    def _slot(self, index: int) -> Tensor:
        parameter, end = self.parameters[index], self._ends[index]
        return self._whole()[end - parameter.numel() : end].view(parameter.shape)

    def _flag(self, index: int) -> Tensor:
        return self._whole()[self._ends[-1] + index]


class Replicated(Strategy):
    """Every rank holds the whole model; gradients are summed over the ranks.

    Buckets are launched in their own order, whatever order gradients come in, so that all ranks
    issue the same calls.

    Args:
        bucket_bytes: a bucket is closed when it holds at least so much.

    Source of the method: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.
    """

    def __init__(self, ranks: Ranks, layout: Layout, bucket_bytes: int = 25_000_000) -> None:
        super().__init__(ranks, layout)
        self.bucket_bytes = bucket_bytes
        self.buckets: list[Bucket] = []
        self._next = self._landed = 0
        self._handlers: list[Ready] = []

    def start(self, model: nn.Module) -> None:
        """Give all ranks rank 0's weights, and listen for gradients."""
        self.share(model)
        self.buckets = cut_buckets([p for _, p in trainable(model)], self.bucket_bytes)
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                ready = partial(self._ready, bucket, index)
                parameter.register_post_accumulate_grad_hook(ready)

    def when_ready(self, model: nn.Module, handler: Ready) -> None:
        """Tell of a bucket's gradients once the next bucket is on its way."""
        self._handlers.append(handler)

    def before_backward(self, *, last: bool) -> None:
        """Sum in the last backward pass of an update only: those before it add up here."""
        super().before_backward(last=last)
        self._next = self._landed = 0
        for bucket in self.buckets:
            bucket.clear()

    def _ready(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        if not self._last:
            return
        bucket.fill(index)
        while self._next < len(self.buckets) and self.buckets[self._next].complete:
            self._launch()
        if self._handlers:
            self._land(max(0, self._next - 1))

    def after_backward(self) -> None:
        """Launch what is left, and wait for all sums."""
        for bucket in self.buckets[self._next :]:
            bucket.fill_left()
            self._launch()
        self._land(len(self.buckets))
        super().after_backward()

    def _launch(self) -> None:
        self.buckets[self._next].launch()
        self._next += 1

    def _land(self, end: int) -> None:
        """Wait for the sums of the buckets before number `end`, and tell of their gradients."""
        for bucket in self.buckets[self._landed : end]:
            bucket.land()
            self._landed += 1
            for handler in self._handlers:
                for parameter in bucket.parameters:
                    if parameter.grad is not None:
                        handler(parameter)


def cut_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Parameters in the order in which gradients come, last layer first, in buckets of one dtype.

    >>> sizes = [torch.nn.Parameter(torch.ones(n)) for n in (100, 30, 30)]
    >>> [[p.numel() for p in bucket.parameters] for bucket in cut_buckets(sizes, 200)]
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
    return [Bucket(group) for group in groups]
