"""Data sets of the hub as streams, read by the library where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.data.test_hub import datasets, repository  # noqa: F401 - fixtures
from tests.data.test_row_stream import LENGTH, batches, same

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.data import Tokenizer, inspect, open_source
from modicum.data.example_table import Placing
from modicum.data.parts import Draw
from modicum.data.row_stream import RowStream
from modicum.data.stream_block import BlockShape
from modicum.data.stream_reader import Place, StreamReader
from modicum.data.streamed_rows import StreamedRows, StreamSampler


@pytest.fixture
def shards(repository: Path) -> str:  # noqa: F811
    """A data set of three files of 30 rows."""
    for part in range(3):
        lines = (json.dumps({"text": f"{part} {n} " * 4}) + "\n" for n in range(30))
        (repository / "easy" / f"part-{part}.jsonl").write_text("".join(lines))
    readme = "---\nconfigs:\n- config_name: all\n  data_files: easy/part-*.jsonl\n---\n"
    (repository / "README.md").write_text(readme)
    return f"hub:{repository},config=all"


def test_rows_are_those_of_the_data_set_and_nothing_is_kept(
    datasets: Any,  # noqa: F811
    shards: str,
    tmp_path: Path,
) -> None:
    source = open_source(shards, streaming=True)
    texts = [document.text for document in source.documents()]
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    assert texts == [document.text for document in open_source(shards).documents()]
    assert list((tmp_path / "cache").rglob("*.arrow"))
    assert (source.files, source.continuous, source.rows.name) == ((), False, "text")
    assert source.describe() == f"{shards}, column 'text'"


@pytest.mark.parametrize("row", [1, 29, 30, 31, 75])
def test_reading_begins_at_a_state_or_a_number(
    datasets: Any,  # noqa: F811
    shards: str,
    row: int,
) -> None:
    reader = StreamReader(open_source(shards, streaming=True))
    texts, place = [], Place()
    for number, (after, unmade) in enumerate(reader.trained(Place()), 1):
        if number == row:
            place = Place(*after[:4], unmade.state())
        texts.append(unmade.make().text)
    assert place.hub is not None
    for begun in (place, Place(*place[:4])):
        found = list(reader.trained(Place(*json.loads(json.dumps(begun)))))
        assert [unmade.make().text for _, unmade in found] == texts[row:]
        assert [after.row for after, _ in found] == list(range(row + 1, 91))


def test_a_stream_of_it_resumes(
    datasets: Any,  # noqa: F811
    shards: str,
    tokenizer: Tokenizer,
) -> None:
    def stream() -> RowStream:
        reader = StreamReader(open_source(shards, streaming=True), draw=Draw(0.1))
        return RowStream(reader, BlockShape(Placing(LENGTH), tokenizer, 300, 8, True), Ranks())

    expected = batches(stream(), 0, 40)
    sampler = StreamSampler(StreamedRows([stream()]), 3)
    for step in range(21):
        sampler.indices(step)
    state = json.loads(json.dumps(sampler.state()))
    assert any(each["place"][4] for each in state["streams"][0])
    again = stream()
    StreamSampler(StreamedRows([again]), 3).resume(state)
    assert all(map(same, batches(again, 20, 20), expected[20:]))


def test_what_the_library_says_and_a_wrong_column_are_one_sentence(
    datasets: Any,  # noqa: F811
    shards: str,
) -> None:
    with pytest.raises(InputError, match=r"^data\.path: `datasets` cannot load it: "):
        open_source(f"{shards}x", streaming=True)
    with pytest.raises(InputError, match=r"config=all:1: body: the row has no such column"):
        inspect(open_source(shards, streaming=True, column="body"))
