"""The order of a stream: a function of data, seed and place, whatever the ranks and the resumes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from tests.data.conftest import LINES

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.data import IGNORED, Batch, Packed, PackedExamples, Tokenizer, open_source, prepare
from modicum.data.example_table import Placing
from modicum.data.parts import VALIDATION, Draw
from modicum.data.row_stream import BrokenStream, RowStream
from modicum.data.stream_block import BlockShape
from modicum.data.stream_reader import StreamReader
from modicum.data.streamed_rows import CYCLE, StreamedRows, StreamSampler

LENGTH = 32


@pytest.fixture(scope="session")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 examples of a prompt and a completion, each of which occurs once."""
    rows = ({"prompt": f"{n}:", "completion": f"{n * 7} " * (n % 5 + 1)} for n in range(60))
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def stream_of(
    file: Path,
    tokenizer: Tokenizer,
    buffer: int = 8,
    *,
    seed: int = 0,
    draw: Draw | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> RowStream:
    shuffle = buffer > 1
    reader = StreamReader(open_source(file, **options), seed, shuffle, draw or Draw())
    shape = BlockShape(Placing(LENGTH, seed=seed), tokenizer, 300, max(buffer, 2), shuffle)
    return RowStream(reader, shape, ranks or Ranks())


def batches(stream: RowStream, first: int, count: int, size: int = 3) -> list[Batch]:
    rows = StreamedRows([stream])
    sampler = StreamSampler(rows, size)
    return [rows.batch(sampler.indices(step)) for step in range(first, first + count)]


def same(one: Batch, other: Batch) -> bool:
    if (one.documents is None) != (other.documents is None):
        return False
    pairs = [(one.input_ids, other.input_ids), (one.labels, other.labels)]
    if one.documents is not None and other.documents is not None:
        pairs.append((one.documents, other.documents))
    return all(torch.equal(a, b) for a, b in pairs)


def trained(stream: RowStream) -> Counter[tuple[int, ...]]:
    """The labels of each example in the rows of the first epoch."""
    rows, found, row = StreamedRows([stream]), Counter[tuple[int, ...]](), 0
    while True:
        rows.reach(row, row + 1)
        if rows.epoch_of(row):
            return found
        batch = rows.batch([row])
        owners = batch.documents if batch.documents is not None else torch.zeros(1, LENGTH)
        for owner in owners[0].unique().tolist():
            labels = batch.labels[0][(owners[0] == owner) & (batch.labels[0] != IGNORED)]
            found[tuple(labels.tolist())] += len(labels) > 0
        row += 1


@settings(max_examples=10)
@given(st.integers(1, 70), st.integers(0, 3))
def test_an_epoch_has_each_example_once(lines, tokenizer, buffer, seed):
    texts = [each.text for each in open_source(lines).documents()]
    wanted = Counter((*ids, tokenizer.eos_id) for ids in tokenizer.encode_batch(texts))
    found = trained(stream_of(lines, tokenizer, buffer, seed=seed))
    assert +found == wanted


@settings(max_examples=10)
@given(st.integers(1, 70), st.integers(0, 30), st.integers(1, 7))
def test_a_stream_resumes_at_any_step(lines, tokenizer, buffer, step, size):
    stream = stream_of(lines, tokenizer, buffer)
    expected = batches(stream, 0, step + 4, size)
    other = stream_of(lines, tokenizer, buffer)
    sampler = StreamSampler(StreamedRows([other]), size)
    for each in range(step + 1):  # the state is taken when this step's rows are there, or before
        sampler.indices(each)
    state = json.loads(json.dumps(sampler.state()))
    for since in (step, step + 1):
        again = stream_of(lines, tokenizer, buffer)
        StreamSampler(StreamedRows([again]), size).resume(state)
        found = batches(again, since, 3, size)
        assert all(map(same, found, expected[since:]))


def test_data_that_fits_into_the_buffer_is_packed_as_if_mapped(lines, tokenizer, tmp_path):
    prepared = prepare(open_source(lines), tokenizer, tmp_path / "store", model_vocabulary=300)
    packed = PackedExamples(prepared.train, LENGTH)
    stream = stream_of(lines, tokenizer, 60)
    rows = StreamedRows([stream])
    rows.reach(0, len(packed))
    assert stream.block(0).stop == len(packed)
    order = stream.block(0).order.tolist()
    assert sorted(order) == list(range(len(packed))) != order
    assert same(rows.batch(range(len(packed))), packed.batch(order))
    assert rows.counts == packed.counts


def test_without_a_shuffle_rows_come_in_the_order_of_the_data(tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("".join(LINES))
    prepared = prepare(open_source(file), tokenizer, tmp_path / "store", model_vocabulary=300)
    packed = Packed(prepared.train, LENGTH)
    rows = StreamedRows([stream_of(file, tokenizer, 1)])
    rows.reach(0, len(packed))
    assert same(rows.batch(range(len(packed))), packed.batch(range(len(packed))))
    assert [rows.width(n) for n in (0, len(packed) - 1)] == [LENGTH, packed.width(len(packed) - 1)]


def test_files_come_in_another_order_each_epoch(tokenizer, tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 40)
    reader = stream_of(tmp_path, tokenizer).reader
    orders = [reader.files(epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert stream_of(tmp_path, tokenizer, 1).reader.files(1) == list(range(6))
    assert stream_of(tmp_path, tokenizer, limit_bytes=300).reader.files(1) == list(range(6))


def test_held_out_are_the_same_documents_in_every_epoch_and_none_is_trained(lines, tokenizer):
    reader = stream_of(lines, tokenizer, draw=Draw(0.3)).reader
    held = [document.text for document in reader.held_out(VALIDATION)]
    kept = [unmade.make().text for _, unmade in reader.trained(reader_place())]
    again = [unmade.make().text for _, unmade in reader.trained(reader_place(1))]
    assert 8 < len(held) < 30
    assert kept == again
    texts = [each.text for each in open_source(lines).documents()]
    assert sorted(held + kept) == sorted(texts)


def reader_place(epoch: int = 0) -> Any:
    from modicum.data.stream_reader import Place

    return Place(epoch)


def test_of_one_file_is_held_out_what_a_mapped_run_holds_out(lines, tokenizer, tmp_path):
    prepared = prepare(
        open_source(lines), tokenizer, tmp_path, model_vocabulary=300, draw=Draw(0.2)
    )
    reader = stream_of(lines, tokenizer, draw=Draw(0.2)).reader
    assert prepared.validation is not None
    assert len(list(reader.held_out(VALIDATION))) == prepared.validation.documents


def test_a_limit_ends_an_epoch(lines, tokenizer):
    content = lines.read_bytes().splitlines(keepends=True)
    limit = sum(map(len, content[:20])) + 3
    stream = stream_of(lines, tokenizer, 6, limit_bytes=limit)
    assert sum(trained(stream).values()) == 20


def test_several_sources_have_their_shares(lines, tokenizer, tmp_path):
    (tmp_path / "b.txt").write_text("".join(LINES))
    other = tmp_path / "b.txt"

    def mixed() -> StreamedRows:
        return StreamedRows([stream_of(lines, tokenizer), stream_of(other, tokenizer)], [3, 1])

    rows = mixed()
    sources = [rows._turn(n) for n in range(2 * CYCLE)]
    assert Counter(source for source, _ in sources) == {0: 1.5 * CYCLE, 1: 0.5 * CYCLE}
    for source in (0, 1):  # each gives its rows one after the other
        own = [number for each, number in sources if each == source]
        assert own == list(range(len(own)))
    assert rows._taken(CYCLE + 5) == [
        sum(each == source for each, _ in sources[: CYCLE + 5]) for source in (0, 1)
    ]
    sampler = StreamSampler(rows, 5)
    expected = [rows.batch(sampler.indices(step)) for step in range(8)]
    sampler = StreamSampler(begun := mixed(), 5)
    for step in range(4):
        sampler.indices(step)
    state = sampler.state()
    sampler = StreamSampler(again := mixed(), 5)
    sampler.resume(state)
    assert all(same(again.batch(sampler.indices(step)), expected[step]) for step in range(4, 8))
    assert begun.epoch_of(20) == 0


def test_sources_without_weights_or_with_tiny_ones_are_refused(lines, tokenizer):
    streams = [stream_of(lines, tokenizer), stream_of(lines, tokenizer)]
    with pytest.raises(InputError, match=r"data\.sources\.0\.weight: .* have weights"):
        StreamedRows(streams)
    with pytest.raises(InputError, match=r"data\.sources\.1\.weight: .* none of 1024 rows"):
        StreamedRows(streams, [1, 1e-6])


def test_a_broken_line_is_named_when_it_comes_and_what_is_before_it_resumes(
    tokenizer, tmp_path, lines
):
    content = lines.read_text().splitlines(keepends=True)
    file = tmp_path / "a.jsonl"
    file.write_text("".join([*content[:30], '{"prompt": "x"\n', *content[31:]]))
    rows = StreamedRows([stream_of(file, tokenizer, 8)])
    sampler, step = StreamSampler(rows, 2), 0
    message = None
    while message is None:
        try:
            sampler.indices(step)
            step += 1
        except BrokenStream as error:
            message = str(error)
    assert "a.jsonl:31: the line is not valid JSON" in message
    assert step > 2
    state = sampler.state()
    file.write_text("".join(content))  # mended
    expected = batches(stream_of(file, tokenizer, 8), 0, step + 5, 2)
    again = stream_of(file, tokenizer, 8)
    StreamSampler(StreamedRows([again]), 2).resume(state)
    assert all(map(same, batches(again, step, 5, 2), expected[step:]))


def test_other_data_where_a_run_resumes_is_refused(tokenizer, tmp_path, lines):
    file = tmp_path / "a.jsonl"
    file.write_text(lines.read_text())
    sampler = StreamSampler(StreamedRows([stream_of(file, tokenizer, 8)]), 4)
    sampler.indices(0)
    state = sampler.state()
    file.write_text(lines.read_text().replace('"3:"', '"4:"'))
    again = StreamSampler(StreamedRows([stream_of(file, tokenizer, 8)]), 4)
    again.resume(state)
    with pytest.raises(InputError, match="the data has changed since this run began"):
        again.indices(0)


def test_data_in_which_nothing_is_trained_is_refused(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": " "}\n' * 5)
    rows = StreamedRows([stream_of(file, tokenizer, 2)])
    with pytest.raises(InputError, match="nothing in the data is trained"):
        rows.reach(0, 1)


def test_a_stream_has_no_length_and_keeps_no_row_behind_it(lines, tokenizer):
    rows = StreamedRows([stream_of(lines, tokenizer, 4)])
    with pytest.raises(InputError, match=r"data\.streaming: how many rows .* is not known"):
        len(rows)
    rows.reach(0, 1)
    rows.reach(30, 31)
    with pytest.raises(LookupError):
        rows.batch([0])


@settings(max_examples=10)
@given(st.integers(1, 5), st.booleans())
def test_made_up_batches_are_as_large_as_any(lines, tokenizer, count, boundaries):
    stream = stream_of(lines, tokenizer)
    rows = StreamedRows([stream])
    rows.boundaries = boundaries
    batch = rows.worst(count)
    assert batch.input_ids.shape == batch.labels.shape == (count, LENGTH)
    assert int(batch.input_ids.max()) < tokenizer.vocabulary_size
    assert (batch.documents is not None) == boundaries
    if batch.documents is not None:
        assert batch.documents.unique().tolist() == [0, 1]


def of_ranks(ranks: Ranks, file: str, tokenizer: str, broken: bool) -> Any:
    stream = stream_of(Path(file), Tokenizer.load(tokenizer), 8, ranks=ranks)
    calls, plain = [], Tokenizer.encode_batch

    def counted(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        calls.append(len(texts))
        return plain(self, texts)

    Tokenizer.encode_batch = counted  # type: ignore[method-assign]
    try:
        found = batches(stream, 0, 12)
    except BrokenStream as error:
        assert broken
        return str(error)
    finally:
        Tokenizer.encode_batch = plain  # type: ignore[method-assign]
    return [[batch.input_ids.tolist(), batch.labels.tolist()] for batch in found], sum(calls)


@pytest.mark.ranks
def test_rows_are_the_same_on_any_number_of_ranks(pool: Pool, lines, tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    arguments = (str(lines), str(tmp_path), False)
    rows, texts = of_ranks(Ranks(), *arguments)
    for size in (2, 3):
        found = pool.run(of_ranks, *arguments, ranks=size)
        assert [each[0] for each in found] == [rows] * size
        # Each document is tokenized by one of them.
        assert all(each[1] < 0.7 * texts for each in found)


@pytest.mark.ranks
def test_what_one_rank_meets_all_report(pool: Pool, tokenizer, tmp_path, lines):
    tokenizer.save(tmp_path)
    content = lines.read_text().splitlines(keepends=True)
    file = tmp_path / "a.jsonl"
    # Valid JSON that makes no document, so that one of the ranks alone looks at it.
    file.write_text("".join([*content[:20], '{"prompt": "x", "completion": 3}\n', *content[21:]]))
    found = pool.run(of_ranks, str(file), str(tmp_path), True, ranks=2)
    assert found[0] == found[1]
    assert "a.jsonl:21: completion: the column holds a number" in found[0]
