from __future__ import annotations

import itertools
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies

from modicum.checkpoint.tensor_slices import TensorSlice, divide, overlap

sizes = strategies.lists(strategies.integers(1, 5), min_size=0, max_size=3)


def box(data, shape):
    offsets = [data.draw(strategies.integers(0, size)) for size in shape]
    return tuple(offsets), tuple(
        data.draw(strategies.integers(0, size - offset))
        for size, offset in zip(shape, offsets, strict=True)
    )


def cells(box):
    return set(itertools.product(*(range(o, o + s) for o, s in zip(*box, strict=True))))


@hypothesis.given(strategies.data())
def test_two_boxes_overlap_where_their_cells_do(data):
    shape = data.draw(sizes)
    one, other = box(data, shape), box(data, shape)
    both = overlap(one, other)
    common = cells(one) & cells(other)
    if both is None:
        assert not common
        return
    whole = torch.arange(math.prod(shape)).view(shape)
    for mine, (offsets, size) in zip(both, (one, other), strict=True):
        place = whole[tuple(slice(o, o + s) for o, s in zip(offsets, size, strict=True))]
        assert set(place[mine].flatten().tolist()) == {int(whole[cell]) for cell in common}


def rows(name, count, first, last, dtype="F32"):
    return TensorSlice(name, dtype, (count, 2), (first, 0), (last - first, 2))


def test_every_piece_is_written_once_and_by_one_who_holds_it():
    a, b, c = rows("a", 8, 0, 8), rows("b", 8, 0, 8), rows("c", 2, 0, 2)
    s0, s1, none = rows("s", 3, 0, 2), rows("s", 3, 2, 3), rows("s", 3, 3, 3)
    ranks = [[a, b, c, s0], [a, b, c, s1], [a, b, c, none]]
    owned = divide(ranks)
    assert sorted(p.stored_name for r in owned for p in r) == ["a", "b", "c", "s", "s@2,0"]
    for held, own in zip(ranks, owned, strict=True):
        assert [piece for piece in held if piece in own] == own
    assert {len([p for p in own if p in (a, b)]) for own in owned} == {0, 1}


def test_replicas_of_shards_share_the_shards():
    s0, s1 = rows("s", 4, 0, 2), rows("s", 4, 2, 4)
    t0, t1 = rows("t", 4, 0, 2), rows("t", 4, 2, 4)
    owned = divide([[s0, t0], [s1, t1], [s0, t0], [s1, t1]])
    assert [len(own) for own in owned] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[rows("a", 4, 0, 2)], []], "hold 4 elements of a, which has 8"),
        ([[rows("a", 4, 0, 4)], [rows("a", 4, 1, 2)]], "hold 10 elements of a"),
        ([[rows("a", 4, 0, 4)], [rows("a", 5, 0, 5)]], "a has another shape or dtype"),
        ([[rows("a", 4, 0, 4)], [rows("a", 4, 0, 4, "F16")]], "a has another shape or dtype"),
    ],
)
def test_pieces_that_make_no_tensor_are_refused(ranks, message):
    with pytest.raises(ValueError, match=message):
        divide(ranks)
