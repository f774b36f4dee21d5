"""What ranks spend where an exchange of the room `comm` carries their gradients and weights.

Policies on the ledger of one process, as those of `modicum.parallel.ledger`; the exchange's own
part is its `ledger`, asked at an `ExchangeQuery`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from modicum.core.contracts.ledger import Entry, Ledger, Phase, TrainedParameter
from modicum.core.ranks.exchange import ExchangeQuery, ShardExchange
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixQuery, TensorShape
from modicum.parallel.ledger import GatheredGroups

ExchangeLedger = Callable[[ExchangeQuery], Ledger]
MatrixLedger = Callable[[MatrixQuery], Ledger]
_FP32 = 4


def row_widths(trained: Sequence[TrainedParameter], ranks: int, bucket_bytes: int) -> list[int]:
    """Elements of a rank's row in each bucket of `Zero`, from the last layer to the first.

    >>> rows = {"a": 100, "b": 3, "c": 3}
    >>> shapes = [TrainedParameter(name, (count, 2), "matrix") for name, count in rows.items()]
    >>> row_widths(shapes, 2, 40)
    [8, 100]
    """
    widths: list[int] = []
    size, kind = 0, 0
    for parameter in reversed(trained):
        if not widths or size >= bucket_bytes or kind != parameter.element_bytes:
            widths.append(0)
            size, kind = 0, parameter.element_bytes
        widths[-1] += parameter.rows(0, ranks) * math.prod(parameter.shape[1:])
        size += parameter.bytes
    return widths


def bucket_shapes(
    trained: Sequence[TrainedParameter], bucket_bytes: int
) -> tuple[tuple[TensorShape, ...], ...]:
    """The shapes in each bucket of gradients, from the last layer to the first.

    >>> rows = {"a": 100, "b": 3, "c": 3}
    >>> shapes = [TrainedParameter(name, (count, 2), "matrix") for name, count in rows.items()]
    >>> bucket_shapes(shapes, 40)
    (((3, 2), (3, 2)), ((100, 2),))
    """
    buckets: list[list[TensorShape]] = []
    size, kind = 0, 0
    for parameter in reversed(trained):
        if not buckets or size >= bucket_bytes or kind != parameter.element_bytes:
            buckets.append([])
            size, kind = 0, parameter.element_bytes
        buckets[-1].append(tuple(parameter.shape))
        size += parameter.bytes
    return tuple(map(tuple, buckets))


def replicated_matrices(
    ledger: Ledger,
    trained: Sequence[TrainedParameter],
    *,
    ranks: int,
    bucket_bytes: int,
    slack: int = 0,
    released: Sequence[int] = (),
    accumulates: bool = False,
    exchange: MatrixLedger,
) -> Ledger:
    """The ledger where every rank holds all weights, and an exchange of matrices sums gradients.

    A bucket's gradients are there a second time, with what is owed, while they are sent: from the
    moment on when the last of them has come, so next to the activations that are left then.

    Args:
        trained: what is trained, in the model's order.
        slack: how far the ledger is below its phase `loss` when the first gradients come.
        released: for each of them, bytes of that phase that are gone when its gradient comes.
        accumulates: whether gradients are there already, to which those of this pass are added.
        exchange: the ledger of what carries them.
    """
    buckets = bucket_shapes(trained, bucket_bytes)
    sizes = [_FP32 * sum(map(math.prod, bucket)) for bucket in buckets]
    gone = list(reversed(released)) if released else [0] * len(trained)
    sent = came = place = 0
    for bucket, size in zip(buckets[:-1], sizes, strict=False):
        left = slack + max(gone[place : place + len(bucket)])
        came += 0 if accumulates else size
        sent, place = max(sent, came + size - left), place + len(bucket)
    last = _last_sent(ledger, trained, sizes)
    own = Ledger.of(
        Entry("workspace", sent, ("loss",), "being sent").in_tensors(sizes),
        Entry("workspace", last, ("backward",), "a bucket being sent").in_one(),
    )
    return ledger + own + exchange(MatrixQuery(buckets, ranks))


def _last_sent(ledger: Ledger, trained: Sequence[TrainedParameter], sizes: Sequence[int]) -> int:
    """Bytes of the last bucket that are there in addition to what the phase `backward` has.

    It leaves when the gradient of what is first in the model has come, and is added up: the first
    block's activations are gone by then, and so is what its backward pass worked in.
    """
    if not sizes:
        return 0
    gone = ledger.bytes("activation", "backward") + ledger.bytes("workspace", "backward")
    return max(0, sizes[-1] + trained[0].bytes - gone)


def with_matrices(
    trained: Sequence[TrainedParameter], bucket_bytes: int, exchange: MatrixLedger
) -> ExchangeLedger:
    """The ledger of what `Zero` sends where an exchange of matrices sums its gradients.

    Weights travel as they are, and full gradients are counted bucket by bucket, so what takes
    their place is counted in full.
    """

    def spent(at: ExchangeQuery) -> Ledger:
        weights = ShardExchange.ledger(replace(at, reductions=0))
        weights = replace(weights, wire=tuple(w for w in weights.wire if w.bytes))
        weights = weights.map_entries(lambda e: None if e.phases == ("backward",) else e)
        buckets = bucket_shapes(trained, bucket_bytes)
        return weights + exchange(MatrixQuery(buckets, at.ranks, counted=False))

    return spent


def zero(
    ledger: Ledger,
    trained: Sequence[TrainedParameter],
    *,
    ranks: int,
    ranks_per_node: int,
    bucket_bytes: int,
    micro_batches: int = 1,
    slack: int = 0,
    exchange: ExchangeLedger,
) -> Ledger:
    """The ledger where each rank has a full model, and optimizer state is sharded over the ranks.

    What stays of gradients and the optimizer's state are the optimizer's to tell, asked for
    `ranks` shards. The rank with the largest part counts. Gradients leave for a bucket as they are
    made, where they need not add up. After the update two buckets of weights are on their way, if
    there are two.

    Args:
        ledger: of one process that does the same work, without gradients that stay.
        trained: what is trained, in the model's order.
        micro_batches: in an update, of which the last sums.
        slack: how far the ledger is below its phase `loss` when the first gradients come.
        exchange: the ledger of what carries them.
    """
    widths = row_widths(trained, ranks, bucket_bytes)
    most, whole = max(widths, default=0), sum(math.prod(p.shape) for p in trained)
    copy_bytes = max((parameter.element_bytes for parameter in trained), default=_FP32)
    phases: tuple[Phase, ...] = ("forward", "loss") if micro_batches > 1 else ()
    site = ExchangeQuery(tuple(widths), ranks, ranks_per_node, copy_bytes=copy_bytes)
    spread = site.weights
    # While the last gradients are sent they are there, and neither their sums nor the weights.
    last = _FP32 * widths[-1] if widths else 0
    first = _FP32 * ranks * widths[0] if widths else 0
    site = replace(site, later=spread + last - ranks * last)
    own = Ledger.of(
        Entry("weight", _FP32 * sum(widths), what="masters, this rank's part"),
        Entry("gradient", _FP32 * whole, phases, "gradients that add up").in_tensors(
            _FP32 * math.prod(p.shape) for p in trained
        ),
        Entry("workspace", max(0, first - slack), ("loss",), "a bucket of gradients").in_one(),
        Entry("gradient", _FP32 * ranks * most, ("backward",), "a bucket of gradients").in_one(),
        Entry("workspace", spread, ("step",), "buckets of weights").in_tensors(
            copy_bytes * own for own, _ in site.neighbours
        ),
    )
    return ledger + own + exchange(site)


def summed_on_sharded(
    ledger: Ledger, parts: GatheredGroups, *, micro_batches: int, exchange: ExchangeLedger
) -> Ledger:
    """The ledger of FSDP2 that gathers weights itself, and sums gradients by an exchange.

    Args:
        ledger: of FSDP2 without it.
        parts: the groups, of which those sum gradients that train something.
        exchange: the ledger of what sums them.
    """
    shards = parts.layout.shards
    rows = tuple(sum(group.trained_parts(shards)) for group in parts.groups if group.trained)
    site = ExchangeQuery(rows, shards, shards, reductions=micro_batches, gathers=False)
    kept = tuple(wire for wire in ledger.wire if wire.collective != "reduce_scatter")
    return replace(ledger, wire=kept) + exchange(site)


def exchanged(shapes: Sequence[TensorShape], layout: Layout) -> list[TensorShape]:
    """The shapes of what an exchange of matrices sums: gradients, on hybrid sharding their rows.

    >>> exchanged([(5, 3), (2,)], Layout(replicas=2, shards=2))
    [(3, 3), (1,)]
    """
    if layout.replicas == 1 or layout.shards == 1:
        return [tuple(shape) for shape in shapes]
    return [(-(-shape[0] // layout.shards), *shape[1:]) if shape else () for shape in shapes]


def matrices_on_sharded(
    ledger: Ledger, parts: GatheredGroups, *, micro_batches: int, exchange: MatrixLedger
) -> Ledger:
    """The ledger of FSDP2 where an exchange of matrices sums gradients; it gathers weights itself.

    Before an update's last micro-batch they add up in full on each rank. On hybrid sharding FSDP2
    sums within a host, and the exchange sums a rank's rows over the hosts.

    Args:
        ledger: of FSDP2 without it.
        parts: the groups, of which those sum gradients that train something.
        exchange: the ledger of what sums them.
    """
    # In the order in which gradients are sent: what no block holds comes last.
    groups = [group for group in (*reversed(parts.blocks), parts.root) if group.trained]
    layout = parts.layout
    hybrid = layout.replicas > 1
    buckets = tuple(tuple(exchanged(group.trained, layout)) for group in groups)
    query = MatrixQuery(buckets, layout.replicas if hybrid else layout.shards, counted=False)
    replaced = "all_reduce" if hybrid else "reduce_scatter"
    kept = tuple(wire for wire in ledger.wire if wire.collective != replaced)
    phases: tuple[Phase, ...] = ("forward", "loss") if micro_batches > 1 and not hybrid else ()
    whole = sum(group.gradients for group in groups)
    added = Entry("gradient", whole, phases, "gradients that add up")
    return replace(ledger, wire=kept) + Ledger.of(added) + exchange(query)


def on_sharded(
    ledger: Ledger,
    parts: GatheredGroups,
    *,
    micro_batches: int,
    ranks_per_node: int,
    exchange: ExchangeLedger,
) -> Ledger:
    """The ledger of FSDP2 where an exchange carries what its groups send.

    A group's gradients are coded when its backward pass is done, and what that ran again is gone.

    Args:
        ledger: of FSDP2 that does not gather blocks a second time.
        parts: the groups; what is in them is fp32 and trained.
        exchange: the ledger of what carries them.
    """
    shards = parts.layout.shards
    # In the order in which gradients are sent: what no block holds comes last.
    groups = (*reversed(parts.blocks), parts.root)
    widths = tuple(group.part(shards) // _FP32 for group in groups)
    site = ExchangeQuery(widths, shards, ranks_per_node, reductions=micro_batches)
    copies = _FP32 * shards * sum(widths)
    alone = (e for e in ledger.entries if (e.kind, e.phases) == ("activation", ("backward",)))
    gone = sum(entry.bytes for entry in alone)

    def beyond(entry: Entry) -> Entry:
        coding = (entry.kind, entry.phases) == ("workspace", ("backward",))
        return replace(entry, bytes=max(0, entry.bytes - gone)) if coding else entry

    return (
        replace(ledger, wire=())
        + Ledger.of(Entry("weight", copies, what="copies of all weights"))
        + exchange(site).map_entries(beyond)
    )
