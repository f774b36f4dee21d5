"""Data parallelism with full replicas: gradients are summed in buckets while the backward runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.ranks.bucketed import Bucket, Bucketed
from modicum.core.ranks.call_queue import CollectiveHandle
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.matrix_replicas import MatrixBucket
from modicum.core.ranks.observed_calls import label_of
from modicum.core.ranks.ranks import Ranks


class Replicated(Bucketed[Bucket]):
    """Every rank holds the full model; gradients are summed over the ranks.

    Args:
        bucket_bytes: a bucket is closed when it holds at least so much.
        matrices: sums the gradients of a bucket its own way; None: as the numbers they are.

    Source of the method: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.
    """

    def __init__(
        self,
        ranks: Ranks,
        layout: Layout,
        bucket_bytes: int = 25_000_000,
        matrices: MatrixExchange | None = None,
    ) -> None:
        super().__init__(ranks, layout, bucket_bytes, matrices)
        self._engine: Collectives | None = None

    @property
    def engine(self) -> Collectives:
        """What sends the numbers as they are, in the default group: an all-reduce needs no turn."""
        if self._engine is None:
            group = None if self.ranks.alone else dist.group.WORLD
            self._engine = Collectives(self.ranks, group=group, in_flight=math.inf)
        return self._engine

    def _bucket(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> Bucket:
        if self.matrices is not None:
            return MatrixBucket(dict(zip(names, parameters, strict=True)), self.matrices)
        return FlatBucket(parameters, self.engine, names)

    def held(self) -> Iterable[Tensor]:
        """What an exchange owes, and its factors."""
        return [] if self.matrices is None else self.matrices.held()


class FlatBucket(Bucket):
    """Parameters of one dtype whose gradients travel together, in one flat tensor.

    Behind the gradients stands one element a parameter, 1 where this rank has a gradient of it: the
    sum tells who was used by no rank at all.

    Args:
        engine: sends it.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], engine: Collectives, names: Sequence[str] = ()
    ) -> None:
        super().__init__(parameters)
        self._engine = engine
        self._label = label_of(names)
        self._ends = list(accumulate(p.numel() for p in parameters))
        self._flat: Tensor | None = None
        self._handle: CollectiveHandle | None = None

    def _put(self, index: int) -> None:
        """Move a parameter's gradient to its place, of which it becomes a view."""
        parameter, place = self.parameters[index], self._slot(index)
        assert parameter.grad is not None
        place.copy_(parameter.grad)
        parameter.grad = place
        self._flag(index).fill_(1)

    def fill_left(self) -> None:
        """Move the gradients that the last backward pass did not touch, and zeros for the rest."""
        super().fill_left()
        for index in set(range(len(self.parameters))) - self._filled:
            self._slot(index).zero_()

    def launch(self) -> None:
        """Begin to sum over the ranks."""
        self._handle = self._engine.all_reduce(self._whole(), label=self._label)

    def land(self) -> None:
        """Wait for the sum, and give gradients to parameters that only other ranks used."""
        assert self._handle is not None
        self._handle.wait()
        for index, parameter in enumerate(self.parameters):
            # Who has a gradient need not ask, which on an accelerator would wait for it.
            if index not in self._filled:
                parameter.grad = self._slot(index) if float(self._flag(index)) else None
        self.clear()

    def clear(self) -> None:
        """Forget the update; gradients are views, and keep the memory as long as they live."""
        super().clear()
        self._flat, self._handle = None, None

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
