"""What data parallelism sends of gradients where a method looks at full matrices.

A `MatrixExchange` takes the gradients of a bucket, by name, and gives their sums over the ranks: in
full, or the rows that a rank owns. The base class sends numbers as they are, in one call a bucket;
a method of the room `comm` binds to a context and gives one that sends fewer.

What an update leaves unsent, and factors that begin the next one, are committed with the update
and not before: `commit` after it, `discard` where it is passed over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import Entry, Ledger, Wire
from modicum.core.contracts.method import Method
from modicum.core.contracts.parameters import trainable
from modicum.core.contracts.state import View
from modicum.core.ranks.agreement import same_terms
from modicum.core.ranks.call_queue import CollectiveHandle
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.exchange import SHARD, ExchangeContext, refuse_complex, terms_of
from modicum.core.ranks.layout import REPLICATE
from modicum.core.ranks.observed_calls import label_of

TensorShape = tuple[int, ...]
# Calls that wait for nothing but the wire: an all-reduce needs no second buffer.
IN_FLIGHT = 8
# A second call of a bucket begins when so many buckets after it have begun, or all have.
BEHIND = 2


class GradientSum(Protocol):
    """A gradient's sum over the ranks, made when it is asked for: fp32."""

    def full(self) -> Tensor:
        """All of it, in the parameter's shape."""

    def rows(self, first: int, last: int) -> Tensor:
        """Its rows from `first` to before `last`, along dimension 0."""


@dataclass(frozen=True)
class PlainSum:
    """A sum that travelled as it is."""

    value: Tensor

    def full(self) -> Tensor:
        """The sum."""
        return self.value

    def rows(self, first: int, last: int) -> Tensor:
        """Some of its rows."""
        return self.value[first:last]


@dataclass(frozen=True)
class ProductSum:
    """A sum that is left [n, r] times the transpose of right [m, r].

    >>> product = ProductSum(torch.eye(3, 2), torch.ones(4, 2), (3, 2, 2))
    >>> product.full().shape, product.rows(2, 3).tolist()
    (torch.Size([3, 2, 2]), [[[0.0, 0.0], [0.0, 0.0]]])
    """

    left: Tensor
    right: Tensor
    shape: TensorShape

    def full(self) -> Tensor:
        """The product."""
        return self.rows(0, self.shape[0])

    def rows(self, first: int, last: int) -> Tensor:
        """Some of its rows, of which no others are computed."""
        return (self.left[first:last] @ self.right.T).view(last - first, *self.shape[1:])


@dataclass(frozen=True)
class MatrixQuery:
    """What the ledger of such an exchange is asked at.

    Args:
        buckets: shapes of the gradients of each bucket, in the order in which they are sent.
        ranks: how many there are.
        counted: whether somebody else counts all full gradients in the phase `backward`, where
            those that were sent are gone.
    """

    buckets: tuple[tuple[TensorShape, ...], ...]
    ranks: int
    counted: bool = True

    @property
    def shapes(self) -> list[TensorShape]:
        """Those of all buckets."""
        return [shape for bucket in self.buckets for shape in bucket]

    def wire(self, messages: Sequence[int], calls: int = 1, element_bytes: int = 4) -> Wire:
        """An all-reduce of so many numbers, fp32 as a rule, for each bucket, on average."""
        others = 2 * (self.ranks - 1) * element_bytes
        sent = sum(others * numbers // self.ranks for numbers in messages)
        return Wire("all_reduce", sent, REPLICATE, calls * len(messages))


class PendingSums:
    """The sums of a bucket, on their way."""

    def __init__(
        self, exchange: MatrixExchange, names: Sequence[str], handle: CollectiveHandle, parts: Parts
    ) -> None:
        self._exchange, self._names = exchange, names
        self._handle: CollectiveHandle | None = handle
        self._parts = parts
        self._totals: list[Tensor] | None = None
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
            totals = parts.split(handle.wait())
            seconds = {name: totals[index] for name, index in places.items()}
        # One element a parameter, the last of the message; it is sent as it is by every exchange.
        used = self._totals[-1].tolist()
        landed: dict[str, GradientSum | None] = {}
        for name, count, total in zip(self._names, used, self._totals, strict=False):
            if count == 0:
                self._exchange.forget(name)
                landed[name] = None
            else:
                landed[name] = self._exchange.decode(name, total, seconds.get(name))
        self._totals, self._again = [], None  # they live as long as who has asked for them
        return landed


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


class MatrixExchange:
    """Sums of full gradients over the ranks, sent as the numbers they are.

    `begin` returns at once; all ranks call it with the same names in the same order. Sums are those
    of gradients, not their mean, in fp32 (of fp64, in fp64). Alone, they are the gradients.

    Args:
        context: ranks, seed, device, links (of the axis `shard`).

    >>> exchange = MatrixExchange()
    >>> pending = exchange.begin({"weight": torch.ones(2, 3), "unused": torch.zeros(2)}, {"weight"})
    >>> sums = pending.land()
    >>> sums["weight"].rows(1, 2).tolist(), sums["unused"]
    ([[1.0, 1.0, 1.0]], None)

    In a loop of one's own, started by `torchrun`, by `joined` (or alone, as here):

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for _ in range(3):
    ...     (model(torch.ones(8, 4)).square().sum() / 8).backward()  # over samples of all ranks
    ...     exchange.reduce(model)
    ...     optimizer.step()
    ...     exchange.commit()
    ...     optimizer.zero_grad()
    """

    # Whether some of what is summed is known when a first sum is there alone.
    sums_twice = False
    # Whether what is sent next depends on what was sent before: then a checkpoint keeps its state.
    stateful = False
    # What the numbers of first calls are rounded to on the wire; None: they are not.
    message_dtype: torch.dtype | None = None
    # The value that it was bound from, which all ranks must have alike.
    value: Method | None = None

    def __init__(self, context: ExchangeContext | None = None) -> None:
        self.context = context or ExchangeContext()
        self.ranks, self.step = self.context.ranks, 0
        self._wire: Collectives | None = None
        self._begun: list[PendingSums] = []
        # By name which rows of a parameter a gradient here is, and of how many: first, end, all.
        self.rows: dict[str, tuple[int, int, int]] = {}

    @property
    def peers(self) -> int:
        """How many ranks sum a gradient."""
        return self.context.peers

    @property
    def wire(self) -> Collectives:
        """The collectives; the first call makes a process group, so all ranks ask alike.

        Raises:
            InputError: another rank has another exchange, or its method other fields.
        """
        if self._wire is None:
            same_terms(self.ranks, "exchange", terms_of(self))
            link = self.context.links.get(SHARD)
            group = self.context.group()
            self._wire = Collectives(self.ranks, group=group, link=link, in_flight=IN_FLIGHT)
        return self._wire

    def connect(self) -> None:
        """Make the process group now, which else the first call does; all ranks call this.

        Raises:
            InputError: as `wire`.
        """
        _ = self.wire

    def check(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Make sure that gradients of these parameters can be summed; `begin` does so too.

        Raises:
            InputError: one is complex, and sent as other numbers than it is.
        """
        if self.message_dtype is not None or (self.stateful and self.peers > 1):
            refuse_complex(named)

    # An update

    def begin(self, gradients: Mapping[str, Tensor], used: Collection[str]) -> PendingSums:
        """Begin to sum a bucket.

        Args:
            gradients: by name, of any float dtype, and of a complex one where `check` takes it;
                zeros where this rank has none. They may be used again when this returns.
            used: the names of those that this rank has.

        Raises:
            InputError: as `check`.
        """
        self.check(gradients.items())
        messages = [self.encode(name, gradient) for name, gradient in gradients.items()]
        flags = messages[0].new_tensor([float(name in used) for name in gradients])
        parts = Parts([*(message.shape for message in messages), flags.shape])
        handle = self.wire.all_reduce(
            parts.joined([*messages, flags], self.message_dtype), label=label_of(list(gradients))
        )
        self._begun.append(PendingSums(self, list(gradients), handle, parts))
        if self.sums_twice and len(self._begun) > BEHIND:
            # By how many have begun, and not by what has come: so all ranks make the same calls.
            self._begun[-1 - BEHIND].turn()
        return self._begun[-1]

    def turn(self) -> None:
        """All buckets have begun: begin what had to wait for the sums of their first calls."""
        for pending in self._begun:
            pending.turn()

    def reduce(self, model: nn.Module) -> None:
        """Make the gradients of a model's trained parameters their sums, all in one bucket."""
        own = dict(trainable(model))
        pending = self.begin(
            {name: gradient_or_zeros(parameter) for name, parameter in own.items()},
            {name for name, parameter in own.items() if parameter.grad is not None},
        )
        for name, total in pending.land().items():
            own[name].grad = None if total is None else total.full().to(own[name].dtype)

    def pay(self, name: str, gradient: Tensor) -> None:
        """On one rank: add what is owed to a gradient, in place; once the update is made, it isn't.

        >>> gradient = torch.ones(2)
        >>> MatrixExchange().pay("bias", gradient)  # of numbers sent as they are nothing is owed
        """

    def rescale(self, factor: float) -> None:
        """From here on all gradients are so many times larger, and so is what is owed of them."""

    def commit(self) -> None:
        """The update is made: what it leaves unsent is owed from here on."""
        self.step += 1
        self._begun.clear()

    def discard(self) -> None:
        """There is no update: everything is as it was before its gradients were summed."""
        self._begun.clear()

    # A method's own part

    def encode(self, name: str, gradient: Tensor) -> Tensor:
        """What is summed over the ranks of this gradient."""
        return gradient

    def encode_again(self, name: str, total: Tensor) -> Tensor | None:
        """What is summed in a second call, given the first one's sum; None: nothing is."""
        return None

    def decode(self, name: str, total: Tensor, second: Tensor | None) -> GradientSum:
        """The gradient's sum, of what was summed."""
        return PlainSum(total)

    def forget(self, name: str) -> None:
        """No rank has this gradient in this update."""

    # State

    def state_dict(self) -> dict[str, Any]:
        """What is alike on all ranks: the number of updates."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it up."""
        self.step = int(state["step"])

    def views(self) -> list[View]:
        """The state that a checkpoint holds, where there is any."""
        return []

    def held(self) -> list[Tensor]:
        """The tensors that persist between updates, now."""
        return []

    @staticmethod
    def ledger(at: MatrixQuery) -> Ledger:
        """Bytes that a rank sends in an update when numbers are sent as they are, and buffers."""
        messages = [dense_message(bucket) for bucket in at.buckets]
        wait = Entry("workspace", 4 * sum(messages), ("backward",), "sums on the wire")
        wait = wait.in_tensors(4 * message for message in messages)
        return Ledger.of(wait, at.wire(messages))

    def close(self) -> None:
        """Forget the wire; process groups end with the default group."""
        self._wire = None


def dense_message(shapes: Sequence[TensorShape]) -> int:
    """Numbers of a bucket that travels as it is: its elements, and a flag for each parameter."""
    return sum(map(math.prod, shapes)) + len(shapes)


def gradient_or_zeros(parameter: Tensor) -> Tensor:
    """A parameter's gradient; zeros that take no memory where it has none."""
    if parameter.grad is not None:
        return parameter.grad
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
