"""The processes of a run, as each of them sees the others.

`Ranks()` is a process alone, for which every exchange is the identity: code that is written for
several ranks runs on one without a question. Exchanges are of numbers and of JSON; nothing that
comes over a wire is unpickled here.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from modicum.core.clock import JOINING, WAITING, WIRE, Clock
from modicum.core.errors import InputError, Interrupted
from modicum.core.ranks.environment import (
    local_rank_and_size,
    meeting_place,
    met_store,
    rank_and_size,
)
from modicum.core.ranks.observed_calls import AGREEMENT, naming
from modicum.core.ranks.receipts import Receipts
from modicum.core.torch_private import default_store

T = TypeVar("T")
# How long ranks wait for each other to come.
MEETING = timedelta(minutes=5)
# An exchange that takes longer than this has lost somebody; waiting for work does not count.
TIMEOUT = timedelta(minutes=30)
_POLL_SECONDS = 0.05
# What gloo and NCCL say when the other side is gone; the store's errors have types of their own.
_GONE = re.compile(
    r"connection (closed by peer|reset|refused)|broken pipe|failed to (send|recv), |"
    r"(read|write) (error|timeout) \[|"
    r"timed out waiting \d+ms for (send|recv)|connect timeout|socket closed|connectFullMesh failed|"
    r"application timeout caused pair closure|remote process (exited|has terminated)|"
    r"ncclRemoteError|ncclSystemError|communicator was aborted|collective operation timeout",
    re.IGNORECASE,
)


class PeerLost(Interrupted):
    """Another rank is gone, so this one ends; the last checkpoint is intact."""


def _on() -> torch.device:
    """Where numbers for people travel from: an accelerator, in a group that knows no processor."""
    kinds = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


@dataclass
class Ranks:
    """This process among the ranks of a run.

    Args:
        rank, size: its number, and how many there are.
        local_rank, local_size: the same among those on this host.
        clock: where this process's time goes; exchanges count in its row `wire`.

    Attributes:
        receipts: checksums of messages, where they have any.

    >>> Ranks().sum(3.0, 4.0), Ranks().broadcast({"a": 1}), Ranks().gather("x")
    ([3.0, 4.0], {'a': 1}, ['x'])
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    clock: Clock = field(default_factory=Clock, repr=False, compare=False)
    receipts: Receipts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.receipts = Receipts(self.rank, self.size)

    def __deepcopy__(self, memo: object) -> Ranks:
        """This one: what is copied is used in the same process, with the same calls in order."""
        return self

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which owns the run folder."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.size == 1

    @property
    def name(self) -> str:
        """This rank, for people: its number and, where there are several hosts, its host."""
        several = self.local_size < self.size
        return f"rank {self.rank}" + (f" on {socket.gethostname()}" if several else "")

    def sum(self, *values: float) -> list[float]:
        """The sums over all ranks, in fp64; every rank calls it with as many values."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, *values: float) -> list[float]:
        """The maxima over all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def min(self, *values: float) -> list[float]:
        """The minima over all ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def _reduced(self, values: tuple[float, ...], operation: Any) -> list[float]:
        if self.alone:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=_on())
        with self.clock(WIRE), peer_errors(), naming(AGREEMENT):
            dist.all_reduce(tensor, operation)
        return tensor.tolist()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (of JSON) at every rank; the others' values do not matter."""
        if self.alone:
            return value
        text = json.dumps(value).encode() if self.first else b""
        with self.clock(WIRE), peer_errors(), naming(AGREEMENT):
            size = torch.tensor([len(text)], device=_on())
            dist.broadcast(size, 0)
            buffer = torch.zeros(int(size), dtype=torch.uint8, device=_on())
            if self.first:
                buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            dist.broadcast(buffer, 0)
        return value if self.first else json.loads(bytes(buffer.tolist()))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (of JSON), in order, at every rank."""
        if self.alone:
            return [value]
        text = json.dumps(value).encode()
        longest = int(self.max(len(text))[0])
        # gloo gathers equal sizes alone
        mine = torch.zeros(longest + 8, dtype=torch.uint8, device=_on())
        framed = len(text).to_bytes(8, "little") + text
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        with self.clock(WIRE), peer_errors(), naming(AGREEMENT):
            everybody = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(everybody, mine)
        values = []
        for framed in (bytes(tensor.tolist()) for tensor in everybody):
            length = int.from_bytes(framed[:8], "little")
            values.append(json.loads(framed[8 : 8 + length]))
        return values

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in order, at every rank.

        Args:
            tensor: on the CPU, of one dimension, as long as it may be; of one dtype on all ranks.
        """
        if self.alone:
            return [tensor]
        sizes = [int(size) for size in self.gather(len(tensor))]
        width = tensor.element_size()  # gloo knows neither int16 nor parts of unequal sizes
        mine = torch.zeros(max(sizes) * width, dtype=torch.uint8, device=_on())
        mine[: len(tensor) * width] = tensor.contiguous().view(torch.uint8)
        with peer_errors():
            everybody = [torch.empty_like(mine) for _ in sizes]
            dist.all_gather(everybody, mine)
        return [
            other[: size * width].cpu().view(tensor.dtype)
            for other, size in zip(everybody, sizes, strict=True)
        ]

    def broadcast_tensor(
        self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int
    ) -> Tensor:
        """The tensor that one rank has, at every rank, on the CPU.

        Args:
            tensor: of this shape and dtype, on the CPU; at other ranks it does not matter.
            source: the rank that has it.
        """
        if self.rank == source and tensor is not None:
            found = tensor.contiguous()
        else:
            found = torch.empty(tuple(shape), dtype=dtype)
        if not self.alone and found.numel():
            with self.clock(WIRE), peer_errors(), naming(AGREEMENT):
                sent = found.reshape(-1).view(torch.uint8).to(_on())  # itself, on a processor
                dist.broadcast(sent, source)
                found = sent.cpu().view(found.dtype).view(found.shape)
        return found

    def first_alone(self, work: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
        """Let rank 0 do `work` that may take long, then the others; `check` may raise in between.

        For what writes files that all read: the others find them written.

        Raises:
            PeerLost: rank 0 died over it.
        """
        if self.alone:
            return work()
        store = met_store()
        with peer_errors():  # counted there, as a group may see more than one `Ranks`
            turn = store.add(f"turns of {self.rank}", 1)
        key = f"turn/{turn}"
        if self.first:
            result = work()
            with peer_errors():
                store.set(key, "done")
            return result
        with self.clock(WAITING), peer_errors():
            while not store.check([key]):
                check()
                time.sleep(_POLL_SECONDS)
        return work()

    def same(
        self,
        what: str,
        value: dict[str, Any],
        explain: Callable[[Any, Any], str],
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        """Make sure that all ranks have the same value as rank 0.

        Args:
            gather: in place of this object's, by a collective.

        Raises:
            InputError: some rank has another, with `explain(rank 0's, its)`; raised on all.
        """
        for rank, other in enumerate(everybody := (gather or self.gather)(value)):
            if other != everybody[0]:
                difference = explain(everybody[0], other)
                raise InputError(f"rank {rank} has another {what} than rank 0: {difference}")


@contextmanager
def joined(device_type: str = "cpu", clock: Clock | None = None) -> Iterator[Ranks]:
    """Join the ranks that the environment tells of, as torchrun sets it; leave them at the end.

    Without RANK and WORLD_SIZE, or with one rank alone, no group is made. A group that is there
    already is used and left as it is.

    Args:
        clock: of this process; a new one where it has none.

    Raises:
        InputError: the environment is incomplete or impossible, or not all ranks came within
            `MEETING`.
        PeerLost: another rank died while they met.
    """
    clock = clock or Clock()
    if dist.is_available() and dist.is_initialized():
        yield Ranks(
            dist.get_rank(),
            dist.get_world_size(),
            int(os.environ.get("LOCAL_RANK", dist.get_rank())),
            int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
            clock=clock,
        )
        return
    rank, size = rank_and_size()
    if size == 1:
        yield Ranks(clock=clock)
        return
    ranks = Ranks(rank, size, *local_rank_and_size(size), clock=clock)
    address = meeting_place()
    if device_type == "cuda":
        _take_device(ranks.local_rank)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    try:
        with clock(JOINING):
            store = _meet(rank, size)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT
            )
            default_store().set(host_key(rank), socket.gethostname())
    except (RuntimeError, ValueError) as error:
        if _GONE.search(str(error)):  # one that was reached died before all had met
            raise _lost(error) from error
        raise _unreachable(rank, address, error) from None
    try:
        yield ranks
    finally:
        # After an error the others may be gone, and an orderly farewell would wait for them.
        dist.destroy_process_group()


def _meet(rank: int, size: int) -> dist.Store:
    """The store that all ranks share, once they are all there."""
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=MEETING))
    store.set_timeout(TIMEOUT)
    return store


def host_key(rank: int) -> str:
    """Where, in the store in which ranks meet, the name of a rank's host stands."""
    return f"modicum/host of {rank}"


def _unreachable(rank: int, address: str, error: Exception) -> InputError:
    why = str(error).strip().splitlines()[0]  # below it are frames of C++
    return InputError(
        f"rank {rank} could not reach the others at {address} within "
        f"{MEETING.total_seconds():g} s, so check that all ranks are started: {why}"
    )


def _take_device(local_rank: int) -> None:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise InputError(
            "there is no such device on this machine for this rank",
            file="the environment",
            field="LOCAL_RANK",
            value=local_rank,
            allowed=f"0 to {count - 1}",
        )
    torch.cuda.set_device(local_rank)


def peer_errors() -> AbstractContextManager[None]:
    """Turn what the communication library says when a peer is gone into `PeerLost`."""
    return _PeerErrors()


class _PeerErrors(AbstractContextManager[None]):
    """A class, for a generator that raises another error than it was thrown keeps the first one.

    So it is from Python 3.12 on: the generator's frame points to the one of `contextlib` that threw
    the error, and that one to the error, until the next garbage collection. The error's frames hold
    the process group, and its connections would be open for as long: ranks that exchange with this
    one alone would wait for it, though it has left the group.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, RuntimeError):
            return
        of_store = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
        if of_store or _GONE.search(str(error)):
            raise _lost(error) from error


def _lost(error: Exception) -> PeerLost:
    first = str(error).strip().splitlines()[0]
    return PeerLost(
        "another rank is gone, so this one ends; the same command resumes from the last "
        f"checkpoint ({first[:160]})"
    )
