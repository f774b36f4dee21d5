from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.data import IGNORED, PackedExamples
from modicum.data.fitting import first_fit_decreasing


@st.composite
def examples_of(draw, longest: int = 20):
    """(ids, prompt): ids are unique over all examples, so that each token says where it is from."""
    lengths = draw(st.lists(st.integers(2, longest), min_size=1, max_size=30))
    ids = iter(range(1, 10_000))
    return [
        ([next(ids) for _ in range(length)], draw(st.integers(0, length - 1))) for length in lengths
    ]


def rows_of(packed: PackedExamples):
    """For each label that is trained: the label, and what its attention sees up to its input."""
    for row in range(len(packed)):
        batch = packed.batch([row])
        inputs, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
        owners = [0] * len(inputs) if batch.documents is None else batch.documents[0].tolist()
        assert packed.count(row) == sum(label != IGNORED for label in labels) > 0
        for place, label in enumerate(labels):
            if label != IGNORED:
                seen = [
                    token
                    for token, owner in zip(inputs[: place + 1], owners, strict=False)
                    if owner == owners[place]
                ]
                yield label, seen


@given(examples_of(longest=9), st.integers(8, 20), st.integers(0, 3))
def test_every_trained_token_has_all_of_its_example_before_it(
    tmp_path_factory, write_store, examples, length, seed
):
    store = write_store(tmp_path_factory.mktemp("store"), examples, examples=True)
    packed = PackedExamples(store, length, seed=seed)
    before = {ids[n]: ids[:n] for ids, _ in examples for n in range(len(ids))}
    seen = dict(rows_of(packed))
    assert all(context == before[label] for label, context in seen.items())
    assert sorted(seen) == sorted(
        token for ids, prompt in examples for token in ids[max(prompt, 1) :]
    )
    assert packed.counts.trained == len(seen)
    assert packed.counts.truncated == packed.counts.split == packed.counts.dropped == 0
    assert packed.counts.filled == sum(len(ids) - 1 for ids, _ in examples)


@given(examples_of(), st.integers(3, 12))
def test_a_truncated_prompt_loses_its_front_and_no_answer_stands_alone(
    tmp_path_factory, write_store, examples, length
):
    store = write_store(tmp_path_factory.mktemp("store"), examples, examples=True)
    try:
        packed = PackedExamples(store, length)
    except InputError:
        assert all(0 < prompt <= len(ids) - 1 - length for ids, prompt in examples)
        return
    where = {token: (ids, prompt) for ids, prompt in examples for token in ids}
    trained = set()
    for label, seen in rows_of(packed):
        ids, prompt = where[label]
        trained.add(label)
        place = ids.index(label)
        assert ids[place - len(seen) : place] == seen  # what came just before it
        if prompt and len(seen) < place:
            assert seen[0] in ids[:prompt]
    long = [(ids, prompt) for ids, prompt in examples if len(ids) - 1 > length]
    dropped = [(ids, p) for ids, p in long if p and p <= len(ids) - 1 - length]
    counts = packed.counts
    assert counts.dropped == len(dropped)
    assert counts.split == sum(not prompt for _, prompt in long)
    assert counts.truncated == len(long) - counts.dropped - counts.split
    lost = {token for ids, _ in dropped for token in ids}
    expected = {token for ids, prompt in examples for token in ids[max(prompt, 1) :]}
    assert trained == expected - lost


@given(examples_of(), st.integers(2, 12), st.booleans())
def test_split_examples_are_trained_in_full(
    tmp_path_factory, write_store, examples, length, boundaries
):
    store = write_store(tmp_path_factory.mktemp("store"), examples, examples=True)
    packed = PackedExamples(store, length, boundaries, too_long="split")
    trained = [label for label, _ in rows_of(packed)]
    expected = [token for ids, prompt in examples for token in ids[max(prompt, 1) :]]
    assert sorted(trained) == sorted(expected)
    assert packed.counts.dropped == packed.counts.truncated == 0


def test_dropped_examples_are_counted(tmp_path, write_store):
    store = write_store(
        tmp_path, [([1, 2, 3, 4, 5, 6], 2), ([7, 8], 0), ([9, 10, 11], 3)], examples=True
    )
    packed = PackedExamples(store, 4, too_long="drop")
    assert packed.batch([0]).labels.tolist() == [[8, IGNORED, IGNORED, IGNORED]]
    assert packed.counts.dropped == 1  # what has nothing to learn is not too long
    with pytest.raises(InputError, match="a row of 4"):
        PackedExamples(write_store(tmp_path, [([1, 2, 3, 4, 5, 6], 1)], examples=True), 4)


def test_a_truncated_prompt_keeps_what_the_tokenizer_puts_in_front(tmp_path, write_store):
    examples = [([1, 2, 3, 4, 5, 6, 7], 5)]
    store = write_store(tmp_path, examples, examples=True, begin=1)
    packed = PackedExamples(store, 4)
    batch = packed.batch([0])
    assert batch.input_ids.tolist() == [[1, 4, 5, 6]]
    assert batch.labels.tolist() == [[IGNORED, IGNORED, 6, 7]]
    assert packed.counts.truncated == 1


def test_rows_are_a_function_of_the_seed(tmp_path, write_store):
    examples = [(list(range(10 * n, 10 * n + 2 + n % 7)), 1) for n in range(1, 60)]
    store = write_store(tmp_path, examples, examples=True)
    one, same, other = (PackedExamples(store, 11, seed=seed) for seed in (1, 1, 2))
    everything = range(len(one))
    assert torch.equal(one.batch(everything).input_ids, same.batch(everything).input_ids)
    assert one.counts.rows == other.counts.rows
    assert not torch.equal(one.batch(everything).input_ids, other.batch(everything).input_ids)
    assert one.counts.waste < 0.05


def test_padding_is_a_document_of_its_own(tmp_path, write_store):
    store = write_store(tmp_path, [([1, 2, 3], 1), ([4, 5, 6], 1)], examples=True)
    packed = PackedExamples(store, 5, seed=0)
    batch = packed.batch([0])
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 1, 1, 2]]
    assert batch.labels.tolist() == [[2, 3, 5, 6, IGNORED]]
    assert packed.worst(2).documents is not None
    alone = PackedExamples(store, 3)
    assert alone.batch([0, 1]).documents is None
    assert alone.worst(2).documents is None


@given(st.lists(st.integers(1, 10), max_size=60))
def test_first_fit_decreasing_leaves_no_row_that_another_could_take_in(widths):
    rows = first_fit_decreasing(widths, 10)
    assert sorted(place for row in rows for place in row) == list(range(len(widths)))
    filled = [sum(widths[place] for place in row) for row in rows]
    assert all(each <= 10 for each in filled)
    for number, row in enumerate(rows):
        assert all(filled[number] + widths[later[0]] > 10 for later in rows[number + 1 :])
        assert row


@given(examples_of(longest=9), st.integers(8, 20))
def test_padding_is_told_apart_from_the_last_example_where_that_is_asked_for(
    tmp_path_factory, write_store, examples, length
):
    store = write_store(tmp_path_factory.mktemp("store"), examples, examples=True)
    packed = PackedExamples(store, length)
    packed.pads_apart = True
    for row in range(len(packed)):
        batch, width = packed.batch([row]), packed.width(row)
        if batch.documents is None:
            assert width == length
            continue
        documents = batch.documents[0].tolist()
        assert width == length or documents[width - 1] != documents[width]
        assert len(set(documents[width:])) <= 1
