"""How the ranks of a run divide its work: one object that plans, meshes and checkpoints read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD = "replicate", "shard"


@dataclass(frozen=True)
class Layout:
    """Ranks in `replicas` groups; the `shards` ranks of a group hold one copy of the weights.

    Rank r is shard r % shards of replica r // shards, so that neighbours, which are often on one
    host, exchange the most. Every rank computes on sequences of its own.

    >>> Layout(replicas=2, shards=4).ranks
    8
    >>> Layout.of(8, shard=4), Layout.of(8)
    (Layout(replicas=2, shards=4, copies=False), Layout(replicas=8, shards=1, copies=False))
    """

    replicas: int = 1
    shards: int = 1
    copies: bool = False
    """Whether every rank computes with a full copy of the weights, all the same."""

    @classmethod
    def of(cls, ranks: int, shard: int = 1, *, copies: bool = False) -> Layout:
        """The layout of so many ranks, `shard` of them to a copy of the weights.

        Raises:
            ValueError: `shard` does not divide `ranks`.
        """
        if ranks % shard:
            raise ValueError(f"{ranks} ranks cannot be split into groups of {shard}")
        return cls(ranks // shard, shard, copies)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.replicas * self.shards

    @property
    def name(self) -> str:
        """For people: `one process`, `ddp`, `fsdp`, `hybrid` or `zero`."""
        if self.ranks == 1:
            return "one process"
        if self.copies:
            return "zero"
        if self.shards == 1:
            return "ddp"
        return "fsdp" if self.replicas == 1 else "hybrid"

    def mesh(self, device_type: str) -> DeviceMesh:
        """The device mesh: (replicate, shard), without the first where there is one replica."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.replicas == 1:
            return init_device_mesh(device_type, (self.shards,), mesh_dim_names=(SHARD,))
        sizes = (self.replicas, self.shards)
        return init_device_mesh(device_type, sizes, mesh_dim_names=(REPLICATE, SHARD))
