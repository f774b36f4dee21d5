from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.data import IGNORED, Batch, Packed


@st.composite
def documents_of(draw, largest: int = 65_535):
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    prompts = [draw(st.integers(0, length - 1)) for length in lengths]
    # Each token is its own place in the data, from the largest id downwards.
    ids = iter(range(largest, 0, -1))
    return [
        ([next(ids) for _ in range(length)], prompt)
        for length, prompt in zip(lengths, prompts, strict=True)
    ]


def trained_targets(documents, boundaries: bool) -> list[int]:
    targets = []
    for number, (ids, prompt) in enumerate(documents):
        first = max(prompt, 1) if boundaries or number == 0 else prompt
        targets += ids[first:]
    return targets


@given(documents_of(), st.integers(1, 9), st.booleans(), st.sampled_from([2, 4]))
def test_every_token_that_should_be_is_trained_exactly_once(
    tmp_path_factory, write_store, documents, length, boundaries, token_bytes
):
    store = write_store(tmp_path_factory.mktemp("store"), documents, token_bytes)
    expected = trained_targets(documents, boundaries)
    if not expected:
        with pytest.raises(InputError, match="nothing in the data is trained"):
            Packed(store, length, boundaries)
        return
    packed = Packed(store, length, boundaries)
    batch = packed.batch(range(len(packed)))
    assert batch.input_ids.shape == batch.labels.shape == (len(packed), length)
    trained = batch.labels[batch.labels != IGNORED]
    assert trained.tolist() == expected  # in order, each once, never a prompt's
    assert packed.total_trained_tokens == len(expected)
    counts = (batch.labels != IGNORED).sum(1).tolist()
    assert counts == [packed.count(row) for row in range(len(packed))]
    assert min(counts) > 0
    # A label is what comes after its input in the stream of all documents.
    stream = [token for ids, _ in documents for token in ids]
    after = dict(pairwise(stream))
    mask = batch.labels != IGNORED
    for token, label in zip(batch.input_ids[mask].tolist(), trained.tolist(), strict=True):
        assert after[token] == label


@given(documents_of(), st.integers(1, 9))
def test_document_numbers_follow_the_tokens(tmp_path_factory, write_store, documents, length):
    store = write_store(tmp_path_factory.mktemp("store"), documents)
    if not trained_targets(documents, boundaries=True):
        return
    packed = Packed(store, length)
    owner = {token: number for number, (ids, _) in enumerate(documents) for token in ids}
    total = sum(len(ids) for ids, _ in documents)
    last_end = documents[-1][0][-1]
    starts = [0, *accumulate(len(ids) for ids, _ in documents)]
    stream = [token for ids, _ in documents for token in ids]
    where = {token: place for place, token in enumerate(stream)}
    assert starts[-1] == total
    for row in range(len(packed)):
        batch = packed.batch([row])
        tokens = batch.input_ids[0].tolist()
        inside = [owner[token] for token in tokens[: total - where[tokens[0]]]]
        padding = length - len(inside)
        assert tokens[len(inside) :] == [last_end] * padding
        assert (batch.labels[0, len(inside) :] == IGNORED).all()
        if len(set(inside)) == 1:
            assert batch.documents is None
        else:
            numbers = [each - inside[0] for each in inside] + [inside[-1] - inside[0] + 1] * padding
            assert batch.documents is not None
            assert batch.documents.dtype == torch.int32
            assert batch.documents[0].tolist() == numbers


def test_two_documents_by_hand(tmp_path, write_store):
    documents = [([11, 12, 13, 0], 0), ([21, 22, 23, 24, 0], 2)]
    store = write_store(tmp_path, documents)
    batch = Packed(store, 5).batch([0, 1])
    assert batch.input_ids.tolist() == [[11, 12, 13, 0, 21], [22, 23, 24, 0, 0]]
    assert batch.labels.tolist() == [[12, 13, 0, -100, -100], [23, 24, 0, -100, -100]]
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 1]]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    joined = Packed(store, 5, boundaries=False).batch([1, 0])
    assert joined.documents is None
    assert joined.labels.tolist() == [[23, 24, 0, -100, -100], [12, 13, 0, -100, -100]]
    plain = write_store(tmp_path, [(ids, 0) for ids, _ in documents])
    joined = Packed(plain, 5, boundaries=False).batch([0])
    assert joined.labels.tolist() == [[12, 13, 0, 21, 22]]


def test_rows_within_a_prompt_are_dropped(tmp_path, write_store):
    store = write_store(tmp_path, [(list(range(1, 21)), 18), ([30, 31], 0)])
    packed = Packed(store, 4)
    # Inputs 1-4, 5-8, 9-12, 13-16 predict prompt tokens only.
    assert len(packed) == 2
    assert packed.batch([0]).input_ids.tolist() == [[17, 18, 19, 20]]
    assert packed.batch([0]).labels.tolist() == [[-100, 19, 20, -100]]
    assert packed.batch([1]).labels.tolist() == [[31, -100, -100, -100]]
    assert [packed.count(row) for row in range(2)] == [2, 1]


def test_large_ids_survive_both_widths(tmp_path, write_store):
    for width, largest in ((2, 65_535), (4, 200_000)):
        store = write_store(tmp_path, [([1, largest, 32_768], 0)], width)
        assert Packed(store, 2).batch([0]).labels.tolist() == [[largest, 32_768]]


def test_a_sequence_longer_than_the_data_is_one_padded_row(tmp_path, write_store):
    packed = Packed(write_store(tmp_path, [([5, 6, 7], 0)]), 8)
    batch = packed.batch([0])
    assert len(packed) == 1
    assert batch.input_ids.tolist() == [[5, 6, 7, 7, 7, 7, 7, 7]]
    assert Counter(batch.labels[0].tolist()) == {6: 1, 7: 1, -100: 6}
    assert batch.documents is None


def test_rows_past_the_last_are_an_index_error(tmp_path, write_store):
    packed = Packed(write_store(tmp_path, [([5, 6, 7], 0)]), 8)
    with pytest.raises(IndexError):
        packed.batch([1])


class Documents(Packed):
    """Rows of given documents' lengths, all tokens trained but each document's first."""

    def __init__(self, lengths: list[int], sequence_length: int, boundaries: bool = True) -> None:
        self.sequence_length, self.boundaries = sequence_length, boundaries
        owners = [number for number, length in enumerate(lengths) for _ in range(length)]
        self.owners = torch.tensor(owners).view(-1, sequence_length)

    def __len__(self) -> int:
        return len(self.owners)

    def count(self, index: int) -> int:
        edges = (self.owners.flatten().diff(append=torch.tensor([-1])) != 0) & self.boundaries
        return self.sequence_length - int(edges.view_as(self.owners)[index].sum())

    def batch(self, indices):
        owners = self.owners[list(indices)]
        ids = torch.tensor(list(indices))[:, None].expand_as(owners).contiguous()
        several = bool((owners != owners[:, :1]).any()) and self.boundaries
        return Batch(ids, ids, (owners - owners[:, :1]).int() if several else None)


def test_the_worst_batch_has_documents_if_any_row_has():
    rows = Documents([8 * 700, 3, 5], sequence_length=8)
    worst = rows.worst(4)
    assert worst.input_ids[:, 0].tolist() == [700] * 4
    assert worst.documents is not None
    assert worst.documents.tolist() == [[0] * 3 + [1] * 5] * 4


@pytest.mark.parametrize(
    "rows", [Documents([24], 8), Documents([8, 8, 8], 8), Documents([3, 21], 8, boundaries=False)]
)
def test_rows_of_one_document_each_have_no_mask_in_the_worst_case_either(rows):
    worst = rows.worst(5)
    assert worst.documents is None
    assert worst.input_ids[:, 0].tolist() == [0, 1, 2, 0, 1]


def test_a_batch_of_no_rows_is_refused():
    with pytest.raises(ValueError, match="0 rows"):
        Documents([8], 8).worst(0)


def test_every_shape_is_there_with_documents_and_without():
    shapes = Documents([8 * 3, 3, 5], sequence_length=8).shapes([3, 4])
    assert [(len(b.input_ids), b.documents is None) for b in shapes] == [
        (4, False), (4, True), (3, False), (3, True)
    ]  # fmt: skip


@given(documents_of(), st.integers(2, 9))
def test_padding_is_told_apart_from_the_last_document_where_that_is_asked_for(
    tmp_path_factory, write_store, documents, length
):
    store = write_store(tmp_path_factory.mktemp("store"), [(ids, 0) for ids, _ in documents])
    if all(len(ids) == 1 for ids, _ in documents):
        return
    packed = Packed(store, length)
    packed.pads_apart = True
    for row in range(len(packed)):
        batch, width = packed.batch([row]), packed.width(row)
        if batch.documents is not None and width < length:
            numbers = batch.documents[0].tolist()
            assert numbers[width - 1] != numbers[width]
        assert batch.documents is not None or width == length
