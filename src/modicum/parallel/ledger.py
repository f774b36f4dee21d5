"""What ranks that share a run spend and save: policies on the ledger of one process.

Traffic is what one rank sends in an update when collectives go around a ring, which is the least
there can be: (n - 1) / n of what is gathered or scattered over n ranks, twice that of what is
summed. Knows shapes of parameters, no model.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from modicum.core.contracts.ledger import Entry, Ledger, Phase, Wire
from modicum.core.ranks.layout import REPLICATE, SHARD, Layout

Shapes = tuple[tuple[int, ...], ...]
_GRADIENT = 4  # bytes of an element of a gradient, whose weight is fp32
# Of full gradients when a block's are copied to be sent: that buffer, and those in which the block
# before is sent and received.
_COPIES = 3
_RUNNING: tuple[Phase, ...] = ("evaluation", "forward", "loss", "backward")


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together: a block's, or those that no block holds.

    Args:
        trained: shapes of those that are trained, in fp32.
        frozen: of each of the others, how many rows it has and the bytes of one.
    """

    trained: Shapes = ()
    frozen: tuple[tuple[int, int], ...] = ()

    @property
    def gradients(self) -> int:
        """Bytes of the full gradients."""
        return _GRADIENT * sum(math.prod(shape) for shape in self.trained)

    def trained_parts(self, shards: int) -> list[int]:
        """Elements of each trained parameter's largest part, of so many."""
        return [_rows(shape, shards) for shape in self.trained]

    def part(self, shards: int) -> int:
        """Bytes of the weights' largest part, of so many."""
        frozen = sum(-(-rows // shards) * each for rows, each in self.frozen)
        return 4 * sum(self.trained_parts(shards)) + frozen

    def gathered(self, shards: int) -> int:
        """Bytes of the full weights as they are gathered: every part as large as the largest."""
        return shards * self.part(shards)


def _rows(shape: tuple[int, ...], shards: int) -> int:
    """Elements of the largest part of a tensor whose rows are split into so many parts.

    A scalar is one row, as no part of it can be less.
    """
    rows = shape[0] if shape else 1
    return -(-rows // shards) * math.prod(shape[1:])


def replicated(
    ledger: Ledger,
    trained: Sequence[int],
    bucket_bytes: int,
    replicas: int,
    *,
    late: int = 0,
    slack: int = 0,
) -> Ledger:
    """The ledger where every rank holds all weights and gradients are summed in flat buckets.

    A gradient is made, and then moved into its bucket, which is there in full from its first
    gradient on.

    Args:
        trained: elements of each trained parameter, in the model's order.
        bucket_bytes: a bucket is closed when it holds at least so much.
        late: bytes of the gradients that come last, in the phase `backward`.
        slack: how far the ledger is below its phase `loss` when the first gradients come.
    """
    if replicas == 1 or not trained:
        return ledger
    buckets = bucket_sizes(trained, bucket_bytes)
    payload = _GRADIENT * (sum(trained) + len(trained))
    return ledger + Ledger.of(
        Entry("gradient", _GRADIENT * len(trained), ("backward", "step"), "who has a gradient"),
        Entry("workspace", max(0, buckets[0] - slack), ("loss",), "a bucket of gradients").in_one(),
        Entry("workspace", min(buckets[-1], late), ("backward",), "a bucket of gradients").in_one(),
        Wire("all_reduce", _summed(payload, replicas), REPLICATE, len(buckets)),
    )


def bucket_sizes(trained: Sequence[int], bucket_bytes: int) -> list[int]:
    """Bytes of each bucket of gradients, from the last layer to the first.

    >>> bucket_sizes([100, 30, 30], 200)
    [240, 400]
    """
    sizes: list[int] = []
    for elements in reversed(trained):
        if not sizes or sizes[-1] >= bucket_bytes:
            sizes.append(0)
        sizes[-1] += _GRADIENT * elements
    return sizes


@dataclass(frozen=True)
class GatheredGroups:
    """A model's parameters in the groups that FSDP2 gathers.

    Args:
        root: what is used first and last, and stays gathered from the forward to the backward pass.
        blocks: gathered one at a time, and one ahead.
    """

    root: Group
    blocks: tuple[Group, ...]
    layout: Layout

    @property
    def groups(self) -> tuple[Group, ...]:
        """All of them."""
        return (self.root, *self.blocks)

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights that the rank with the largest part holds."""
        return sum(group.part(self.layout.shards) for group in self.groups)

    @cached_property
    def trained_parts(self) -> list[int]:
        """Elements of each trained parameter in that part."""
        parts = (group.trained_parts(self.layout.shards) for group in self.groups)
        return [elements for group in parts for elements in group]

    @property
    def trained(self) -> int:
        """Trained elements of that part."""
        return sum(self.trained_parts)

    @cached_property
    def frozen_bytes(self) -> int:
        """Bytes of that part's weights which are not trained."""
        return self.weights - 4 * self.trained

    @cached_property
    def block(self) -> int:
        """Bytes of the largest block when it is gathered."""
        return max((block.gathered(self.layout.shards) for block in self.blocks), default=0)

    @cached_property
    def block_gradients(self) -> int:
        """Bytes of the full gradients of the block that has most."""
        return max((block.gradients for block in self.blocks), default=0)


def sharded(
    ledger: Ledger,
    parts: GatheredGroups,
    *,
    micro_batches: int,
    reshard_after_forward: bool = True,
    recompute: bool = False,
    slack: int = 0,
) -> Ledger:
    """The ledger where weights, gradients and optimizer state are sharded over ranks (FSDP2).

    What stays of gradients and the optimizer's state are the optimizer's to tell.

    Ranks shard every parameter by rows; the rank with the largest part counts. A block's weights
    are gathered into one buffer, by way of another of gloo's, while the block before computes, and
    copied out of it; its gradients are copied into a buffer, summed and sharded while the next
    block's are made.

    Args:
        ledger: of one process that does the same work, without gradients that stay.
        micro_batches: in an update; gradients are summed and sharded after each.
        reshard_after_forward: whether blocks are gathered a second time for the backward pass.
        recompute: whether they run a second time in it.
        slack: how far the ledger is below its phase `loss` when the last block's backward begins.
    """
    shards = parts.layout.shards
    block, gradients = parts.block, parts.block_gradients
    kept = ledger.map_entries(lambda entry: None if entry.kind == "weight" else entry)
    root = parts.root.gathered(shards)
    everything = 0 if reshard_after_forward else sum(b.gathered(shards) for b in parts.blocks)
    own = block if reshard_after_forward else 0  # not yet among everything

    def beside(phase: Phase) -> int:
        """The next block is gathered while one runs; the only one, before it runs."""
        ahead = 2 * block if len(parts.blocks) > 1 else 0
        return max(ahead, own + block - kept.bytes("workspace", phase))

    # In the last block's backward pass its gradients come in addition to the weights; in the one
    # before it those are on the wire, where the last block's activations were. A block that runs
    # again takes most when it has no gradients yet, and those of the one before are on the wire.
    copies, fresh = (2, 0) if recompute else (_COPIES, 1)
    sent = max(0, copies * gradients - kept.bytes("activation", "backward"))
    ahead = block if reshard_after_forward or not recompute else 0
    made = own + 2 * ahead + fresh * gradients + sent
    # With two blocks there is no other one to gather when the last one's gradients are sent.
    gathered = own + (ahead if len(parts.blocks) > 2 else 0)
    return kept + Ledger.of(
        Entry("weight", parts.weights, what="model, this rank's part"),
        Entry("buffer", root, _RUNNING, "gathered: embedding and head"),
        Entry("buffer", everything, _RUNNING, "gathered: blocks"),
        Entry("buffer", block, ("evaluation", "forward"), "gathered: a block"),
        Entry("buffer", beside("evaluation"), ("evaluation",), "gathered: next to it"),
        Entry("buffer", beside("forward"), ("forward",), "gathered: next to it"),
        Entry("buffer", max(0, made - slack), ("loss",), "gathered: blocks and gradients"),
        Entry("buffer", gathered, ("backward",), "gathered: blocks"),
        Entry("gradient", parts.root.gradients, ("backward",), "unsharded: embedding and head"),
        Entry("gradient", (fresh + copies) * gradients, ("backward",), "unsharded: of a block"),
        *_traffic(parts, micro_batches, gathers=2 if reshard_after_forward else 1),
    )


def _traffic(parts: GatheredGroups, micro_batches: int, gathers: int) -> list[Wire]:
    """What a rank sends in an update; `gathers` of blocks a micro-batch."""
    shards, replicas = parts.layout.shards, parts.layout.replicas
    blocks = sum(group.gathered(shards) for group in parts.blocks)
    gathered = parts.root.gathered(shards) + gathers * blocks
    trained = 4 * parts.trained
    learning = sum(bool(group.trained) for group in parts.groups)
    around = (1 + gathers * len(parts.blocks)) * micro_batches
    wires = [
        Wire("all_gather", _passed_on(gathered, shards) * micro_batches, SHARD, around),
        Wire(
            "reduce_scatter",
            _passed_on(shards * trained, shards) * micro_batches,
            SHARD,
            learning * micro_batches,
        ),
        Wire(
            "all_reduce",
            _summed(trained, replicas) * micro_batches,
            REPLICATE,
            learning * micro_batches,
        ),
    ]
    return [wire for wire in wires if wire.bytes]


def staging(
    trained: Sequence[int], state_bytes: int, replicas: int = 1, *, owed: int = 0
) -> Ledger:
    """The copy of the trained state that is written while training continues.

    Of the ranks that hold the same, each copies some tensors, as evenly by bytes as they go.

    Args:
        trained: elements that a rank holds of each trained parameter.
        state_bytes: of the optimizer's state, taken to be spread as two tensors a parameter.
        replicas: how many ranks hold the same.
        owed: bytes that each rank has of its own: what its exchange owes.
    """
    loads, elements = [0] * replicas, max(1, sum(trained))
    for own in sorted(trained, reverse=True):
        moment = state_bytes * own // (2 * elements)
        for size in (_GRADIENT * own, moment, moment):
            heapq.heapreplace(loads, loads[0] + size)
    return Ledger.of(Entry("host", max(loads) + owed, what="checkpoint staging", place="host"))


def _passed_on(size: int, ranks: int) -> int:
    """Bytes that a rank sends when `size` bytes are gathered or scattered over ranks in a ring."""
    return size * (ranks - 1) // ranks


def _summed(size: int, ranks: int) -> int:
    """The same when `size` bytes are summed: scattered, then gathered."""
    return 2 * _passed_on(size, ranks)
