"""Gradients that travel together: flat buffers, and how parameters are split into them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from modicum.core.ranks.call_queue import CollectiveHandle
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.sent_kinds import refuse_sparse

T = TypeVar("T")


class Fused:
    """Parameters of one dtype whose gradients are reduce-scattered and gathered in one buffer.

    It holds the gradients, then one element a parameter, 1 where this rank has a gradient of it
    (the sum tells who was used by no rank at all), then zeros up to a multiple of the ranks. It is
    there from the first gradient of an update until the last of its parameters is updated.

    Args:
        label: whose gradients they are, for those who observe calls.

    Attributes:
        filled: places of the parameters of which this rank has a gradient.
        due: how many of the summed gradients nobody has taken yet.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int, *, label: str = "") -> None:
        self.parameters, self._label = list(parameters), label
        self._ends = list(accumulate(p.numel() for p in parameters))
        self.elements = self._ends[-1]
        self._padded = padded(self.elements, len(self.parameters), ranks)
        self.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        self._flat: Tensor | None = None
        self._call: CollectiveHandle | None = None
        self._shard: Tensor | None = None
        self.filled: set[int] = set()
        self.due = 0

    @property
    def complete(self) -> bool:
        """Whether every gradient is in."""
        return len(self.filled) == len(self.parameters)

    @property
    def travels(self) -> bool:
        """Whether a call with its gradients or sums has begun, and has not been waited for."""
        return self._call is not None

    def fill(self, index: int) -> None:
        """Move a parameter's gradient to its place, of which it becomes a view.

        Raises:
            InputError: it is sparse.
        """
        parameter, place = self.parameters[index], self._slot(index)
        assert parameter.grad is not None
        refuse_sparse([(self._label, parameter.grad)])
        place.copy_(parameter.grad)
        parameter.grad = place
        self._flag(index).fill_(1)
        self.filled.add(index)

    def reduce_scatter(self, collectives: Collectives) -> None:
        """Begin to sum over the ranks; a gradient that has not come counts as zeros.

        From here on no parameter has a gradient, so that nobody takes this rank's for the sum.
        """
        for index, parameter in enumerate(self.parameters):
            if index not in self.filled and parameter.grad is not None:
                self.fill(index)  # earlier backward passes left it, and the last did not touch it
            elif index not in self.filled:
                self._slot(index).zero_()
            parameter.grad = None
        self._call = collectives.reduce_scatter(self._whole(), label=self._label)

    def land(self, rank: int) -> Tensor:
        """Wait for the sum; this rank's part of the gradients, which may be changed in place."""
        assert self._call is not None
        self._shard, self._call = self._call.wait(), None
        before = rank * self._shard.numel()
        return self._shard[: max(0, self.elements - before)]

    def all_gather(self, collectives: Collectives) -> None:
        """Begin to gather the sums of all parts."""
        assert self._shard is not None
        whole = self._whole()
        self._call = collectives.all_gather(self._shard, into=whole, label=self._label)
        self._shard = None
        self.due = len(self.parameters)

    def gradient(self, index: int) -> Tensor | None:
        """Take a parameter's summed gradient, once it is there; None where no rank has one."""
        self.due -= 1
        if self._call is not None:
            self._call.wait()
            self._call = None
        # Who has a gradient need not ask, which on an accelerator would wait for it.
        used = index in self.filled or bool(self._flag(index))
        return self._slot(index) if used else None

    def _whole(self) -> Tensor:
        if self._flat is None:
            first = self.parameters[0]
            self._flat = torch.empty(self._padded, dtype=first.dtype, device=first.device)
            self._flat[self.elements :] = 0
        return self._flat

    def _slot(self, index: int) -> Tensor:
        parameter, end = self.parameters[index], self._ends[index]
        return self._whole()[end - parameter.numel() : end].view(parameter.shape)

    def _flag(self, index: int) -> Tensor:
        return self._whole()[self.elements + index]


def padded(elements: int, parameters: int, ranks: int) -> int:
    """Elements of the buffer for the gradients of so many parameters.

    >>> padded(10, 2, 5)
    15
    """
    return -(-(elements + parameters) // ranks) * ranks


def fuse(
    layers: Sequence[Sequence[T]],
    *,
    nbytes: Callable[[T], int],
    kind: Callable[[T], Hashable] = lambda part: None,
    bucket_bytes: float,
    count: int | None = None,
) -> list[list[T]]:
    """Split the parameters of layers into groups, layer by layer.

    Args:
        nbytes: bytes of a parameter.
        kind: parameters of different kinds (dtype, device) do not share a group.
        bucket_bytes: a group is closed after the layer with which it holds at least so much.
        count: close a group after so many layers instead.

    >>> fuse([[3, 1], [2], [5], [1]], nbytes=lambda size: size, bucket_bytes=5)
    [[3, 1, 2], [5], [1]]
    >>> fuse([[3, 1], [2], [5], [1]], nbytes=lambda size: size, bucket_bytes=5, count=3)
    [[3, 1, 2, 5], [1]]
    """
    groups: list[list[T]] = []
    unfinished: dict[Hashable, tuple[list[T], set[int]]] = {}
    for place, layer in enumerate(layers):
        for part in layer:
            if kind(part) not in unfinished:
                groups.append([])
                unfinished[kind(part)] = (groups[-1], set())
            parts, places = unfinished[kind(part)]
            parts.append(part)
            places.add(place)
        for key, (parts, places) in list(unfinished.items()):
            size = sum(map(nbytes, parts))
            if (size >= bucket_bytes) if count is None else (len(places) >= count):
                del unfinished[key]
    return groups
