"""Whether what came is what was sent: checksums of messages, compared once an update.

A message that was damaged on its way would be wrong numbers. Networks check what they carry, with
few bits, and not within a card or a switch. So where a message goes over a cable, who sends it adds
its checksum to a sum of its own, and who receives it takes that of what came away from the same
sum. When all have what was sent in an update, each sum is zero, or the rank that it belongs to sent
something else than came. Sums that all ranks make of each other's values must be alike.

The sums themselves travel with what ranks agree on before each update, and more often before a
checkpoint, so none is written of an update that was damaged.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.core.errors import Interrupted

_BITS = 32  # so that sums over ranks are exact in fp64
_MASK = (1 << _BITS) - 1
_PATIENCE = 8  # updates that wait for calls to end
_ROW = 4096  # words that are added up before a sum is multiplied by its place


class DamagedMessage(Interrupted):
    """What a rank sent is not what came; the last checkpoint is intact."""


def checksum(values: Tensor) -> int:
    """32 bits of a tensor's bytes, in one pass over them: which they are, and where in 32 KiB.

    >>> one = torch.arange(10.0)
    >>> checksum(one) == checksum(one.clone()), checksum(one) == checksum(one.flip(0) + 1)
    (True, False)
    """
    if not values.numel():
        return 0
    data = values.detach().reshape(-1).view(torch.uint8)
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    whole = len(data) // 8
    words, rest = data[: 8 * whole].view(torch.int64), data[8 * whole :]
    rows = whole // _ROW
    sums = [words[: rows * _ROW].view(rows, _ROW).sum(1), words[rows * _ROW :], rest.long()]
    places = torch.cat(sums)
    places = places * torch.arange(1, 2 * len(places), 2)
    total = int(places.sum()) & (1 << 64) - 1
    return (total ^ total >> _BITS) & _MASK


@dataclass
class _Update:
    """What this rank knows of the messages that were asked for in an update."""

    differences: Counter[int] = field(default_factory=Counter)  # by the rank that sent
    alike: int = 0
    open: int = 0  # calls that have not ended


class Receipt:
    """A call's part in the checksums of its update."""

    def __init__(self, receipts: Receipts, update: _Update) -> None:
        self._receipts, self._update = receipts, update

    def sent(self, parts: Sequence[Tensor]) -> None:
        """This rank sends these, of which several may be one and the same tensor."""
        each, times = {id(part): part for part in parts}, Counter(map(id, parts))
        total = sum(times[key] * checksum(part) for key, part in each.items())
        with self._receipts.lock:
            self._update.differences[self._receipts.rank] += total

    def came(self, parts: Iterable[tuple[int, Tensor]]) -> None:
        """These came, each from the rank of that number; the call has ended."""
        found = [(rank, checksum(part)) for rank, part in parts]
        with self._receipts.lock:
            for rank, each in found:
                self._update.differences[rank] -= each
            self._update.open -= 1

    def made(self, values: Tensor | None) -> None:
        """These are the same on all ranks, if they are given; the call has ended."""
        each = 0 if values is None else checksum(values)
        with self._receipts.lock:
            self._update.alike += each
            self._update.open -= 1


class Receipts:
    """The checksums of one process.

    Attributes:
        on: whether messages have any; alike on all ranks.

    >>> alone = Receipts(0, 1)
    >>> alone.mine(), alone.on
    ([], False)
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.lock = threading.Lock()
        self.begin(False)

    def begin(self, on: bool) -> None:
        """Forget all there is, and have checksums from here on, or none."""
        self.on, self._asked, self._earlier = on, _Update(), list[_Update]()

    def of_call(self) -> Receipt | None:
        """A call is asked for; None: messages have no checksums."""
        if not self.on:
            return None
        with self.lock:
            self._asked.open += 1
            return Receipt(self, self._asked)

    def mine(self) -> list[float]:
        """For a sum over the ranks, all of which have asked for as many calls.

        They are of the update before the last one, as calls of that may be under way.
        """
        if not self.on:
            return []
        with self.lock:
            still, alike = (sum(getattr(u, n) for u in self._earlier) for n in ("open", "alike"))
            differences = [sum(u.differences[r] for u in self._earlier) for r in range(self.size)]
        places = [alike & _MASK if rank == self.rank else 0 for rank in range(self.size)]
        return [float(still), *(float(each & _MASK) for each in differences), *map(float, places)]

    def take(self, sums: list[float]) -> None:
        """Take the sum of what all ranks gave; the next update begins.

        Raises:
            DamagedMessage: what came is not what was sent; on all ranks.
        """
        if not sums:
            return
        with self.lock:
            # With calls that have not ended everywhere those of the next update are compared; in
            # vain, where an update was given up in the middle.
            if not sums[0] or len(self._earlier) == _PATIENCE:
                self._earlier.clear()
            self._earlier.append(self._asked)
            self._asked = _Update()
        if sums[0]:
            return
        differences, alike = sums[1 : 1 + self.size], sums[1 + self.size :]
        if wrong := [rank for rank, each in enumerate(differences) if int(each) & _MASK]:
            raise _damaged(f"{_named(wrong)} sent other bytes than came")
        if len(set(alike)) > 1:
            most = Counter(alike).most_common(1)[0][0]
            others = [rank for rank, each in enumerate(alike) if each != most]
            rest = [rank for rank in range(self.size) if rank not in others]
            raise _damaged(f"{_named(others)} made other sums than {_named(rest)}")

    def settle(self, total: Callable[..., list[float]]) -> None:
        """Compare all there is; every rank calls this, with its sum over the ranks."""
        for _ in range(2 if self.on else 0):
            self.take(total(*self.mine()))


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _damaged(what: str) -> DamagedMessage:
    return DamagedMessage(
        f"{what}: a message of the last two updates was damaged on its way, so the run ends; the "
        "same command resumes from the last checkpoint"
    )
