"""Sums of a bucket's gradients on their way, and the flat buffers that they travel in."""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modicum.core.ranks.call_queue import CollectiveHandle
from modicum.core.ranks.observed_calls import label_of

if TYPE_CHECKING:
    from modicum.core.ranks.matrix_exchange import GradientSum, MatrixExchange


class PendingSums:
    """The sums of a bucket, on their way."""

    def __init__(
        self, exchange: MatrixExchange, names: Sequence[str], handle: CollectiveHandle, parts: Parts
    ) -> None:
        self._exchange, self._names = exchange, names
        self._handle: CollectiveHandle | None = handle
        self._parts = parts
        self._totals: list[Tensor] | None = None
        self._added: list[Tensor] = []  # of each message all numbers, added up
        self._again: tuple[dict[str, int], CollectiveHandle, Parts] | None = None

    def turn(self) -> None:
        """Begin the second call, where the exchange has one; every rank calls it in one order."""
        if self._totals is not None:
            return
        assert self._handle is not None
        total = self._handle.wait()
        self._handle = None  # and with it what was sent
        if self._exchange.message_dtype is not None:
            total = total.float()
        self._add_up(total)
        self._totals = self._parts.split(total)
        second = {
            name: message
            for name, total in zip(self._names, self._totals, strict=False)
            if (message := self._exchange.encode_again(name, total)) is not None
        }
        if second:
            parts = Parts([message.shape for message in second.values()])
            handle = self._exchange.wire.all_reduce(
                parts.joined(list(second.values())), label=label_of(self._names)
            )
            self._again = {name: index for index, name in enumerate(second)}, handle, parts

    def land(self) -> dict[str, GradientSum | None]:
        """Wait for the sums, by name, once; None: no rank has such a gradient."""
        self.turn()
        assert self._totals is not None
        seconds: dict[str, Tensor] = {}
        if self._again is not None:
            places, handle, parts = self._again
            total = handle.wait()
            self._add_up(total)
            totals = parts.split(total)
            seconds = {name: totals[index] for name, index in places.items()}
        # One element a parameter, the last of the message; it is sent as it is by every exchange.
        flags, added = self._totals[-1], [each.view(1) for each in self._added]
        # Asked for at once, as on an accelerator asking waits for it.
        known = torch.cat([flags, *added]).tolist()
        self._exchange.finite &= all(map(cmath.isfinite, known[len(flags) :]))
        landed: dict[str, GradientSum | None] = {}
        for name, count, total in zip(self._names, known, self._totals, strict=False):
            if count == 0:
                self._exchange.forget(name)
                landed[name] = None
            else:
                landed[name] = self._exchange.decode(name, total, seconds.get(name))
        self._totals, self._again = [], None  # they live as long as who has asked for them
        return landed

    def _add_up(self, total: Tensor) -> None:
        """Note what shows later whether a number of it is not finite, for who keeps some of it."""
        if self._exchange.stateful:
            self._added.append(total.sum())


class Parts:
    """Where tensors of these shapes lie in one flat buffer: fp32, and fp64 where one of them is."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._sizes = [math.prod(shape) for shape in self._shapes]

    def joined(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """A new buffer that holds them, rounded to `dtype` where one is given."""
        if dtype is None:
            dtypes = (tensor.dtype for tensor in tensors)
            dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        flat = torch.empty(sum(self._sizes), dtype=dtype, device=tensors[0].device)
        for place, tensor in zip(self.split(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat

    def split(self, flat: Tensor) -> list[Tensor]:
        """The tensors as views of the buffer."""
        parts = flat.split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
