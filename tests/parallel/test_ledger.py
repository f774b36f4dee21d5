from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.contracts.ledger import Entry, Ledger, TrainedParameter
from modicum.core.ranks.bucketed import cut
from modicum.core.ranks.exchange import ExchangeQuery
from modicum.core.ranks.layout import Layout
from modicum.parallel.exchange_ledger import exchanged, on_sharded, replicated_matrices
from modicum.parallel.ledger import (
    GatheredGroups,
    Group,
    bucket_sizes,
    replicated,
    sharded,
    staging,
)

shapes = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
).map(tuple)
rows = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), max_size=4).map(tuple)
groups = st.builds(Group, trained=shapes, frozen=rows)

ONE = Ledger.of(
    Entry("weight", 4000, what="model"),
    Entry("activation", 900, ("forward", "loss")),
    Entry("workspace", 50, ("forward",)),
    Entry("workspace", 300, ("loss",)),
)
# 400 elements that no block holds, two blocks of 300.
MODEL = Group(trained=((40, 10),)), (Group(trained=((30, 10),)),) * 2


def trained_of(group: Group) -> int:
    return sum(map(math.prod, group.trained))


def bytes_of(group: Group) -> int:
    return 4 * trained_of(group) + sum(count * each for count, each in group.frozen)


@given(st.lists(groups, min_size=1, max_size=4), st.integers(1, 8))
def test_parts_make_the_whole_and_the_largest_counts(found, shards):
    parts = GatheredGroups(found[0], tuple(found[1:]), Layout(shards=shards))
    trained, weights = sum(map(trained_of, found)), sum(map(bytes_of, found))
    assert parts.trained * shards >= trained
    assert parts.weights * shards >= weights
    # A part has at most one row more than an even share of a parameter.
    row = sum(4 * math.prod(shape[1:]) for group in found for shape in group.trained)
    row += sum(each for group in found for _, each in group.frozen)
    assert parts.weights * shards < weights + shards * row
    assert parts.frozen_bytes == parts.weights - 4 * parts.trained
    if shards == 1:
        assert (parts.weights, parts.trained) == (weights, trained)


@given(st.lists(groups, min_size=1, max_size=3), st.integers(2, 6), st.integers(1, 3))
def test_what_persists_is_divided_and_what_is_gathered_comes_on_top(found, shards, micro_batches):
    parts = GatheredGroups(found[0], tuple(found[1:]), Layout(shards=shards))
    cut = sharded(Ledger(), parts, micro_batches=micro_batches)
    assert shards * cut.bytes("weight") >= sum(map(bytes_of, found))
    assert cut.bytes("gradient", "step") == 0
    assert cut.bytes("buffer", "step") == 0
    assert cut.bytes("buffer", "forward") >= parts.root.gathered(shards) + parts.block


def test_a_model_cut_in_two():
    cut = sharded(ONE, GatheredGroups(*MODEL, Layout(shards=2)), micro_batches=1, slack=250)
    assert cut.bytes("weight") == 4000 // 2
    # Root and a block's buffer; gathering the next block meanwhile takes two more.
    assert cut.bytes("buffer", "forward") == 1600 + 1200 + 2 * 1200
    # In the backward pass: weights of two blocks and a buffer, a block's gradients as they are made
    # and three times on the wire, less what is free by then.
    assert cut.bytes("buffer", "loss") == 1600 + 3 * 1200 + 1200 + 3 * 1200 - 250
    assert cut.bytes("gradient", "backward") == 1600 + 4 * 1200
    assert cut.bytes("activation", "forward") == 900
    wires = {wire.collective: wire for wire in cut.wire}
    assert wires["all_gather"].bytes == (1600 + 2 * 2400) // 2
    assert wires["reduce_scatter"].bytes == 4000 // 2
    assert (wires["reduce_scatter"].count, wires["reduce_scatter"].axis) == (3, "shard")
    assert "all_reduce" not in wires


def test_blocks_that_stay_gathered_take_memory_and_spare_the_wire():
    parts = GatheredGroups(*MODEL, Layout(shards=2))
    given_back = sharded(ONE, parts, micro_batches=2)
    kept = sharded(ONE, parts, micro_batches=2, reshard_after_forward=False)
    assert kept.bytes("buffer", "loss") == given_back.bytes("buffer", "loss") + 1200
    saved = given_back.wire[0].bytes - kept.wire[0].bytes
    assert saved == 2 * 2400 // 2  # one gathering of all blocks less, in each of two micro-batches


def test_replicas_of_shards_sum_a_part_each():
    alone = sharded(ONE, GatheredGroups(*MODEL, Layout(shards=2)), micro_batches=3)
    hybrid = sharded(ONE, GatheredGroups(*MODEL, Layout(replicas=4, shards=2)), micro_batches=3)
    assert hybrid.entries == alone.entries
    *same, summed = hybrid.wire
    assert tuple(same) == alone.wire
    assert (summed.collective, summed.axis, summed.count) == ("all_reduce", "replicate", 9)
    assert summed.bytes == 3 * 2 * 2000 * 3 // 4


def test_frozen_weights_are_gathered_and_have_no_gradients():
    root = Group(frozen=((40, 20),))
    block = Group(trained=((5, 4),), frozen=((30, 20),))
    parts = GatheredGroups(root, (block, block), Layout(shards=2))
    cut = sharded(Ledger(), parts, micro_batches=1)
    assert cut.bytes("weight") == 400 + 2 * (3 * 4 * 4 + 300)  # five rows: three, and two
    assert parts.block == 2 * (3 * 4 * 4 + 300)
    assert [wire.count for wire in cut.wire] == [5, 2]


def test_a_scalar_is_one_row():
    parts = GatheredGroups(Group(trained=((), (3, 2))), (), Layout(shards=2))
    assert (parts.trained_parts, parts.weights) == ([1, 4], 20)
    assert exchanged([(), (3, 2)], Layout(replicas=2, shards=2)) == [(), (2, 2)]


def test_replicas_hold_everything_and_a_bucket():
    whole = replicated(ONE, [400, 300, 300], 1000, 2, late=2000, slack=500)
    assert bucket_sizes([400, 300, 300], 1000) == [1200, 1200, 1600]
    assert whole.bytes("weight") == ONE.bytes("weight")
    assert whole.bytes("gradient", "step") == 3 * 4
    assert whole.bytes("workspace", "loss") == 300 + 1200 - 500
    assert whole.bytes("workspace", "backward") == 1600
    (wire,) = whole.wire
    assert (wire.collective, wire.axis, wire.count) == ("all_reduce", "replicate", 3)
    assert wire.bytes == 4012  # of two ranks each sends as much as it sums
    assert replicated(ONE, [400, 300, 300], 1000, 4).wire[0].bytes == 4012 * 3 // 2
    assert replicated(ONE, [400, 300, 300], 1000, 1) == ONE


def sent_matrices(released, *, accumulates, slack=0):
    """Bytes in addition where an exchange of matrices sends five parameters in two buckets."""
    counts = {"embedding": 5, "first": 40, "second": 30, "third": 20, "norm": 5}
    trained = [TrainedParameter(name, (rows, 10), "matrix") for name, rows in counts.items()]
    ledger = replicated_matrices(
        ONE + Ledger.of(Entry("activation", 400, ("backward",))),
        trained,
        ranks=2,
        bucket_bytes=1700,
        slack=slack,
        released=released,
        accumulates=accumulates,
        exchange=lambda at: Ledger(),
    )
    return ledger.bytes("workspace", "loss") - 300, ledger.bytes("workspace", "backward")


def test_a_bucket_of_matrices_is_sent_when_its_last_gradient_has_come():
    # Norm, third and second are 2200 bytes: there twice when the second one's gradient has come.
    released = [900, 600, 300, 0, 0]
    assert sent_matrices(released, accumulates=True) == (2200 - 300, 1800 + 200 - 400)
    assert sent_matrices(released, accumulates=True, slack=500)[0] == 2200 - 800
    assert sent_matrices(released, accumulates=False)[0] == 2 * 2200 - 300
    assert sent_matrices([], accumulates=True)[0] == 2200
    assert sent_matrices([4000, 3000, 2500, 0, 0], accumulates=True)[0] == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 600))
def test_buckets_are_those_that_are_cut(elements, bucket_bytes):
    parameters = [torch.nn.Parameter(torch.empty(count)) for count in elements]
    real = [sum(p.nbytes for p in group) for group in cut(parameters, bucket_bytes)]
    assert bucket_sizes(elements, bucket_bytes) == real


def test_a_staged_checkpoint_lies_on_the_host():
    staged = ONE + staging([900, 100], 8000)
    assert staged.peak() == ONE.peak()
    (row,) = [row for row in staged.table() if row["kind"] == "host"]
    assert row["bytes"] == 12_000


def test_what_a_rank_owes_is_its_own_and_staged_too():
    assert staging([900, 100], 8000, owed=500).entries[0].bytes == 12_500
    halves = staging([100, 100], 1600, replicas=2, owed=500).entries[0].bytes
    assert halves == staging([100, 100], 1600, replicas=2).entries[0].bytes + 500


def test_of_what_several_hold_each_stages_some():
    def bytes_of(*elements: int, replicas: int) -> int:
        return staging(elements, 8 * sum(elements), replicas).entries[0].bytes

    assert bytes_of(100, 100, replicas=2) == 3 * 400
    assert bytes_of(100, 10, replicas=2) == 2 * 400  # one has two of the large ones
    assert bytes_of(100, 10, replicas=4) == 400  # a tensor is staged whole


@given(st.lists(st.integers(1, 99), min_size=1, max_size=9), st.integers(1, 5))
def test_staged_parts_make_the_whole(elements, replicas):
    each = staging(elements, 8 * sum(elements), replicas).entries[0].bytes
    assert 12 * sum(elements) <= each * replicas
    assert each <= 12 * sum(elements) / replicas + 4 * max(elements)


def test_what_is_coded_is_there_when_what_ran_again_is_gone() -> None:
    def coding(at: ExchangeQuery) -> Ledger:
        return Ledger.of(
            Entry("workspace", 700, ("backward",), "coded"),
            Entry("workspace", 90, ("step",), "weights coded"),
        )

    parts = GatheredGroups(*MODEL, Layout(shards=2))
    kept = ONE + Ledger.of(Entry("activation", 900, ("forward", "loss", "backward")))
    again = ONE + Ledger.of(Entry("activation", 500, ("backward",)))
    found = [
        on_sharded(each, parts, micro_batches=1, ranks_per_node=2, exchange=coding)
        for each in (kept, again)
    ]
    added = [
        one.bytes(phase="backward") - each.bytes(phase="backward")
        for one, each in zip(found, (kept, again), strict=True)
    ]
    copies = 4 * 2 * (200 + 150 + 150)
    assert added == [copies + 700, copies + 200]
    assert [one.bytes("workspace", "step") for one in found] == [90, 90]
