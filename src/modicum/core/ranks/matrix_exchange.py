"""What data parallelism sends of gradients where a method looks at full matrices.

A `MatrixExchange` takes the gradients of a bucket, by name, and gives their sums over the ranks: in
full, or the rows that a rank owns. The base class sends numbers as they are, in one call a bucket;
a method of the room `comm` binds to a context and gives one that sends fewer.

What an update leaves unsent, and factors that begin the next one, are committed with the update
and not before: `commit` after it, `discard` where it is passed over.
"""

from __future__ import annotations

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
from modicum.core.errors import InputError
from modicum.core.ranks.agreement import differing, same_model, same_terms, shape_terms
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.exchange import SHARD, ExchangeContext, terms_of
from modicum.core.ranks.layout import REPLICATE
from modicum.core.ranks.observed_calls import label_of
from modicum.core.ranks.one_rank import NOTHING_TRAVELS, warn_of_one_rank
from modicum.core.ranks.pending_sums import Parts, PendingSums
from modicum.core.ranks.sent_kinds import refuse_complex, refuse_sparse

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

    In a loop of one's own, started by `torchrun`, by `joined` (or alone, as here). There the model,
    too, is compared with the other ranks', and what is not finite is not committed:

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for _ in range(3):
    ...     (model(torch.ones(8, 4)).square().sum() / 8).backward()  # over samples of all ranks
    ...     exchange.reduce(model)
    ...     optimizer.step()
    ...     exchange.commit()
    ...     model.zero_grad()
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
        # Whether those who take the sums make them means over the ranks.
        self.means = False
        self._wire: Collectives | None = None
        self._begun: list[PendingSums] = []
        # Whether all sums of this update are, as far as something of them would be kept.
        self.finite = True
        self._met: dict[str, str] | None = None  # terms of the parameters that ranks have compared
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

    def meet(self, model: nn.Module) -> None:
        """Make sure that all ranks train parameters of the same names, shapes, dtypes and order.

        `reduce` does so with the first model. Where others are trained later, as when some are no
        longer frozen, all ranks call this before.

        Raises:
            InputError: as `wire`; or another rank trains other ones.
        """
        self.connect()
        same_model(self.ranks, model)
        self._met = shape_terms(trainable(model))

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
            InputError: as `check`; or a gradient is sparse.
        """
        self.check(gradients.items())
        refuse_sparse(gradients.items())
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
        """Make the gradients of a model's trained parameters their sums, all in one bucket.

        Clear them all before the next pass, also those of parameters that the optimizer has not: a
        sum to which a pass adds is summed again.

        Raises:
            InputError: as `meet`; or others are trained than those that ranks have compared.
        """
        self.discard()  # of an update that was interrupted
        if self._met is None and self.ranks.alone:
            warn_of_one_rank(NOTHING_TRAVELS)
        own = dict(trainable(model))
        if self._met is None or self.ranks.alone:
            self.meet(model)
        elif (terms := shape_terms(own.items())) != self._met:
            # No other rank is asked, which may have noticed nothing and not answer.
            raise InputError(
                "other parameters are trained than ranks have compared: "
                f"{differing(self._met, terms, 'then', 'now')}; call meet(model) on all ranks "
                "where that changes"
            )
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
        """The update is made: what it leaves unsent is owed from here on.

        Where something is owed, and a sum is not finite, this is `discard`, on all ranks.
        """
        if self.finite:
            self.keep()
            self.step += 1
        self.discard()

    def discard(self) -> None:
        """There is no update: everything is as it was before its gradients were summed."""
        self._begun.clear()
        self.finite = True

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

    def keep(self) -> None:
        """Take up what the update leaves; then it is counted, and what it staged is forgotten."""

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
        self._wire = self._met = None


def dense_message(shapes: Sequence[TensorShape]) -> int:
    """Numbers of a bucket that travels as it is: its elements, and a flag for each parameter."""
    return sum(map(math.prod, shapes)) + len(shapes)


def gradient_or_zeros(parameter: Tensor) -> Tensor:
    """A parameter's gradient; zeros that take no memory where it has none."""
    if parameter.grad is not None:
        return parameter.grad
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
