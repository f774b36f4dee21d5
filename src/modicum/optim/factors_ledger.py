"""What a transform with two inverse factors a layer spends."""

from __future__ import annotations

import math

from modicum.core.contracts.ledger import Entry, Ledger, Phase, Wire, Work
from modicum.optim.layer_factors import factor_sides
from modicum.optim.owners import assign
from modicum.optim.transform import TransformQuery

_KEPT: tuple[Phase, ...] = ("forward", "loss", "backward")


def factors_ledger(at: TransformQuery, *, every: int, item: int) -> Ledger:
    """Factors and products of the rank that owns most, what is exchanged, and scratch memory.

    The largest scratch is that of a refresh, or of a product with both factors in fp32; of sharded
    gradients all rows are in three buffers in addition. What is exchanged in a refresh counts in
    every update by its share.

    Args:
        every: updates from one refresh to the next.
        item: bytes of an element of a factor, and of a vector on the wire.
    """
    named = {p.name for p in at.parameters}
    sides, rows = [], []
    for p in at.layers:
        bias = p.name.removesuffix("weight") + "bias" in named
        sides.append(factor_sides(p.shape[0], math.prod(p.shape[1:]), bias))
        rows.append([p.rows(rank, at.shards) for rank in range(at.shards)])
    squares = {index: o * o + i * i for index, (o, i) in enumerate(sides)}
    owners = assign(squares, at.shards)
    factors, products, wire = ([0] * at.shards for _ in range(3))
    for index, (o, i) in enumerate(sides):
        factors[owners[index]] += squares[index]
        products[owners[index]] += 2 * o * i * (o + i) + 8 * squares[index] // every
        for rank, own in enumerate(rows[index]):
            wire[rank] += 4 * i * (o - own if rank == owners[index] else own)
    vectors = sum(p.shape[0] + math.prod(p.shape[1:]) + 1 for p in at.layers)
    inputs = sum(math.prod(p.shape[1:]) for p in at.layers)
    # Factors in fp32, G with its bias, the product and its halves; a refresh has three of a factor.
    each = (max(4 * (o * o + i * i + 4 * o * i), 12 * max(o, i) ** 2) for o, i in sides)
    most, gathered = max(each, default=0), 0
    if at.shards > 1:
        gathered = 12 * sum(own[0] * i for own, (_, i) in zip(rows, sides, strict=True))
    share = 2 * (at.ranks - 1) / at.ranks / every
    found = Ledger.of(
        Entry("optimizer", item * max(factors), what="inverse factors"),
        Entry("buffer", 4 * vectors, what="sums of the update"),
        Entry("activation", 4 * inputs, _KEPT, "sums of inputs"),
        Entry("workspace", most + gathered + 12 * vectors, ("step",), "factors, rows, vectors"),
        Work(at.positions * vectors, phase="backward"),
        Work(max(products), phase="step"),
    )
    if at.ranks > 1:
        sent = int(share * (item * vectors + 4 * (len(sides) + 1)))
        found += Ledger.of(Wire("all_reduce", sent, "data", 2))
    if at.shards > 1:
        found += Ledger.of(Wire("all_to_all", max(wire), "shard", 2))
    return found
