"""The rows of several stores as one list."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modicum.data import Packed, PackedExamples
from modicum.data.mixed_rows import MixedRows, source_shares
from modicum.data.view import view_of


@pytest.fixture
def mixed(tmp_path, write_store):
    """Examples, of which two share a row; continuous text; and one short example."""
    for name in "abc":
        (tmp_path / name).mkdir()
    examples = [([1, 2, 3], 0), ([4, 5, 6], 1), *(([n] * 6, 2) for n in range(7, 13))]
    texts = [(list(range(20, 41)), 0)]
    return MixedRows(
        [
            PackedExamples(write_store(tmp_path / "a", examples, examples=True), 6),
            Packed(write_store(tmp_path / "b", texts, token_bytes=4), 6),
            PackedExamples(write_store(tmp_path / "c", [([50, 51], 0)], examples=True), 6),
        ]
    )


def test_a_row_is_what_its_source_has_there(mixed):
    for part, places in zip(mixed.parts, mixed.places, strict=True):
        for row, place in enumerate(places.tolist()):
            own, joint = part.batch([row]), mixed.batch([place])
            assert joint.input_ids.equal(own.input_ids)
            assert joint.labels.equal(own.labels)
            assert (joint.documents is None) == (own.documents is None)
            assert mixed.count(place) == part.count(row) == joint.count
            assert view_of(mixed, place) == view_of(part, row)
    assert sorted(torch.cat(mixed.places).tolist()) == list(range(len(mixed)))


@given(st.data())
def test_a_batch_holds_its_rows_in_their_order(tmp_path_factory, write_store, data):
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    mixed = MixedRows(
        [
            Packed(write_store(folder / "a", [(list(range(1, 40)), 0)]), 5),
            PackedExamples(
                write_store(folder / "b", [([n, n + 1], 0) for n in range(50, 80)], examples=True),
                5,
            ),
        ]
    )
    indices = data.draw(st.lists(st.integers(0, len(mixed) - 1), min_size=1, max_size=9))
    batch = mixed.batch(indices)
    for place, index in enumerate(indices):
        own = mixed.batch([index])
        assert batch.input_ids[place].equal(own.input_ids[0])
        assert batch.labels[place].equal(own.labels[0])
        if own.documents is not None:
            assert batch.documents[place].equal(own.documents[0])
        elif batch.documents is not None:
            assert not batch.documents[place].any()


def test_the_first_rows_are_of_all_sources_in_proportion(mixed):
    sizes = [len(part) for part in mixed.parts]
    for first in range(1, len(mixed) + 1):
        for size, places in zip(sizes, mixed.places, strict=True):
            assert abs(int((places < first).sum()) - first * size / len(mixed)) < 1.01


def test_counts_are_sums_and_the_worst_batch_has_several_documents(mixed):
    assert mixed.counts.rows == len(mixed) == sum(len(part) for part in mixed.parts)
    assert mixed.counts.trained == mixed.total_trained_tokens
    assert mixed.counts.filled == sum(mixed.width(row) for row in range(len(mixed)))
    assert mixed.worst(3).documents is not None


def test_shares_say_how_often_a_source_is_gone_through(mixed):
    counts = [part.counts for part in mixed.parts]
    first, second, third = source_shares(["a", "b", "c"], counts, [5, 5, 2])
    assert first["name"] == "a"
    assert first["rows"] == counts[0].rows
    assert first["passes"] == round(5 / counts[0].rows, 4)
    assert third["passes"] == 2
    assert first["share"] + second["share"] + third["share"] == pytest.approx(1, abs=1e-5)
