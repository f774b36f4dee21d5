"""An owner for each sharded matrix: which rank has it in full, and how it gets there and back.

Where parameters are sharded along dimension 0 (FSDP2), a method that needs a full matrix has it on
one of the ranks that hold its parts: its owner. In a round every rank owns one matrix. It gathers
the gradient's rows from the others, makes the update, and sends each its rows of that. What the
method keeps for a matrix is on the owner alone.

Who owns what is a function of the shapes: the most expensive first, each to the rank that has
least. The plan can tell it beforehand, and a run that resumes finds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.ranks.ranks import peer_errors
from modicum.core.ranks.sharding import is_sharded, own_part, shard_dim

K = TypeVar("K", bound=Hashable)


def assign(costs: Mapping[K, int], ranks: int) -> dict[K, int]:
    """The owner of each matrix: the most expensive first, each to the rank that has least so far.

    >>> assign({"a": 1, "b": 4, "c": 2, "d": 1}, ranks=2)
    {'b': 0, 'c': 1, 'a': 1, 'd': 1}
    """
    load = [0] * ranks
    owners = {}
    for key in sorted(costs, key=lambda key: -costs[key]):
        owners[key] = load.index(min(load))
        load[owners[key]] += costs[key]
    return owners


@dataclass(frozen=True)
class Cut:
    """How a parameter is sharded: this rank among those that hold its parts, and who has copies.

    Args:
        group: the ranks that hold the parts; None: this rank has the full parameter.
        replicas: the ranks that hold what this one does, where the mesh says so.
    """

    group: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, parameter: Tensor) -> Cut:
        """How a parameter is sharded; an unsharded one is not.

        Raises:
            ValueError: it is sharded otherwise than along dimension 0, or more than once.
        """
        if not is_sharded(parameter):
            return cls()
        mesh = parameter.device_mesh
        replicas = None
        for dim, placement in enumerate(parameter.placements):
            if placement.is_replicate() and mesh.size(dim) > 1:
                replicas = mesh.get_group(dim)
            elif not placement.is_replicate() and not placement.is_shard(0):
                raise ValueError(f"sharded otherwise than along dimension 0: {placement}")
        over = shard_dim(parameter)
        if over is None:
            return cls(replicas=replicas)
        return cls(mesh.get_group(over), replicas, mesh.get_local_rank(over), mesh.size(over))

    def rows(self, parameter: Tensor) -> list[int]:
        """How many rows each of the ranks holds; the last ones may have none."""
        each = -(-parameter.shape[0] // self.size)
        return [max(0, min(each, parameter.shape[0] - rank * each)) for rank in range(self.size)]

    def exchange(self, parts: Mapping[int, Tensor], sizes: Sequence[int], like: Tensor) -> Tensor:
        """Send each rank its part, and return what the ranks sent, one after the other.

        Args:
            sizes: elements that come from each rank; none: nothing comes.
        """
        sizes = sizes or [0] * self.size
        sent = [parts[rank].numel() if rank in parts else 0 for rank in range(self.size)]
        outgoing = like.new_empty(sum(sent))
        for rank, place in enumerate(outgoing.split(sent)):
            if rank in parts:
                place.view_as(parts[rank]).copy_(parts[rank])
        incoming = like.new_empty(sum(sizes))
        with peer_errors():
            dist.all_to_all_single(incoming, outgoing, list(sizes), sent, group=self.group)
        return incoming


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix among all that an optimizer has: its number, its owner, how it is sharded."""

    number: int
    owner: int
    cut: Cut

    @property
    def here(self) -> bool:
        """Whether this rank owns it."""
        return self.owner == self.cut.rank


@dataclass
class Owners:
    """The places of an optimizer's matrices.

    Args:
        cost: bytes that are kept for a matrix of a shape.
    """

    cost: Callable[[tuple[int, int]], int]
    places: dict[Tensor, OwnedMatrix] = field(default_factory=dict)
    _waiting: list[Tensor] = field(default_factory=list)

    def add(self, matrices: Sequence[Tensor]) -> None:
        """Take up matrices; those that come before anything is asked are assigned together."""
        self._waiting += matrices

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._assigned()

    def __getitem__(self, parameter: Tensor) -> OwnedMatrix:
        return self._assigned()[parameter]

    def __len__(self) -> int:
        return len(self._assigned())

    def all(self) -> Mapping[Tensor, OwnedMatrix]:
        """All matrices and their places."""
        return self._assigned()

    def _assigned(self) -> dict[Tensor, OwnedMatrix]:
        by_group: dict[tuple[dist.ProcessGroup | None, int], dict[Tensor, int]] = {}
        # Where one is refused all keep waiting, so that whoever asks again is refused again.
        cuts = {matrix: Cut.of(matrix) for matrix in self._waiting}
        for matrix, cut in cuts.items():
            rows, columns = matrix.shape
            by_group.setdefault((cut.group, cut.size), {})[matrix] = self.cost((rows, columns))
        owners: dict[Tensor, int] = {}
        for (_, size), costs in by_group.items():
            owners |= assign(costs, size)
        for matrix in self._waiting:
            self.places[matrix] = OwnedMatrix(len(self.places), owners[matrix], cuts[matrix])
        self._waiting = []
        return self.places

    def rounds(self, matrices: Sequence[nn.Parameter]) -> Iterator[Round]:
        """These matrices in rounds, at most one for each owner; unsharded ones alone.

        All ranks that hold parts of them call this with the same ones, in the same order.
        """
        queues: dict[Hashable, list[Round]] = {}
        for matrix in matrices:
            place = self[matrix]
            kind = matrix if place.cut.group is None else (place.cut.group, _gradient(matrix).dtype)
            rounds = queues.setdefault(kind, [])
            free = next((one for one in rounds if place.owner not in one.matrices), None)
            if free is None:
                rounds.append(free := Round(place.cut))
            free.matrices[place.owner] = matrix
        for rounds in queues.values():
            yield from rounds


@dataclass
class Round:
    """Matrices that are updated at once, by the rank that owns each."""

    cut: Cut
    matrices: dict[int, nn.Parameter] = field(default_factory=dict)

    @property
    def mine(self) -> nn.Parameter | None:
        """The one that this rank owns, if any."""
        return self.matrices.get(self.cut.rank)

    def gather(self) -> Tensor | None:
        """The full gradient of this rank's matrix."""
        mine = self.mine
        if self.cut.group is None:
            return None if mine is None else own_part(_gradient(mine))[0]
        parts = {owner: own_part(_gradient(m))[0] for owner, m in self.matrices.items()}
        like = next(iter(parts.values()))
        rows = [] if mine is None else self.cut.rows(mine)
        columns = 0 if mine is None else mine.shape[1]
        received = self._exchange(parts, [count * columns for count in rows], like)
        return None if mine is None else received.view(mine.shape)

    def scatter(self, update: Tensor | None) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every matrix of the round with this rank's rows of its update (fp32)."""
        mine, cut = self.mine, self.cut
        if cut.group is None:
            assert mine is not None
            assert update is not None
            yield mine, update
            return
        parts: dict[int, Tensor] = {}
        if mine is not None and update is not None:
            parts = dict(enumerate(update.split(cut.rows(mine))))
        sizes = [0] * cut.size
        for owner, matrix in self.matrices.items():
            sizes[owner] = cut.rows(matrix)[cut.rank] * matrix.shape[1]
        like = own_part(next(iter(self.matrices.values())))[0]
        received = self._exchange(parts, sizes, torch.empty(0, device=like.device)).split(sizes)
        for owner, matrix in self.matrices.items():
            yield matrix, received[owner].view(-1, matrix.shape[1])

    def _exchange(self, parts: Mapping[int, Tensor], sizes: Sequence[int], like: Tensor) -> Tensor:
        return self.cut.exchange(parts, sizes, like)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
