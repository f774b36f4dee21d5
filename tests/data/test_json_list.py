from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.data import json_list as module
from modicum.data import open_source
from modicum.data.json_list import json_rows

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=5)


def write(folder: Path, content: str | bytes) -> Path:
    file = folder / "a.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


@given(ROWS, st.integers(1, 40), st.sampled_from([None, 2]), st.booleans())
def test_a_list_is_its_objects_however_it_is_read(tmp_path_factory, rows, block, indent, escaped):
    text = json.dumps(rows, indent=indent, ensure_ascii=escaped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        file = write(tmp_path_factory.mktemp("list"), f"\ufeff{text}\n")
        found = list(json_rows(file))
    assert [row.columns for row in found] == rows
    assert [row.number for row in found] == list(range(1, len(rows) + 1))
    assert sum(row.size for row in found) <= file.stat().st_size


def test_a_json_file_may_also_hold_lines(tmp_path):
    file = write(tmp_path, '{"a": 1}\n\n{"a": 2}\n')
    assert [(row.number, row.columns) for row in json_rows(file)] == [(1, {"a": 1}), (3, {"a": 2})]


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1},\n {"a" 2}]', r"a\.json:2: .*Expecting ':' delimiter \(line 2 of the file\)"),
        ('[{"a": 1}\n{"a": 2}]', r":2: the list is not valid JSON: '{' where ',' is expected"),
        ('[{"a": 1}, 7]', r":2: the row is a number, not an object"),
        ('[{"a": 1}, [7]]', r":2: the row is a list, not an object"),
        ('[{"a": 1}, {"b": "x', r":2: .*Unterminated string|:2: the list does not end"),
        ('[{"a": 1}, {"b": 2', r":2: the list does not end: the file is truncated"),
        ('[{"a": 1}', r":2: the list does not end: the file is truncated"),
        ('[{"a": 1}, ]', r":2: the row is not valid JSON: Expecting value"),
        ('[{"a": 1}] [2]', r":1: something follows after the list"),
        ("[" * 100_000, r":1: the row is not valid JSON|the row is"),
        ('[{"a": 1}, {"a": ' + "9" * 5000 + "}]", r":2: the row is not valid JSON: Exceeds"),
        (b'[{"a": 1}, {"a": "caf\xe9"}]', r":[12]: byte 0xe9 at offset 21 is not UTF-8"),
    ],
)
def test_a_bad_list_is_refused_with_its_row(tmp_path, monkeypatch, text, message, block):
    monkeypatch.setattr(module, "_BLOCK", block)
    with pytest.raises(InputError, match=message):
        list(json_rows(write(tmp_path, text)))


def test_a_row_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_ROW", 1 << 17)
    with pytest.raises(InputError, match=r":1: the row is longer than"):
        list(json_rows(write(tmp_path, b'[{"a": "' + b"x" * 1_000_000 + b"\xff")))


def test_a_long_list_is_read_in_little_memory(tmp_path):
    file = write(tmp_path, json.dumps([{"text": "x" * 1000}] * 4000))
    tracemalloc.start()
    try:
        assert sum(1 for _ in json_rows(file)) == 4000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_list_of_conversations_is_rows_to_a_source(tmp_path):
    rows = [{"instruction": "Add.", "input": "2, 2", "output": "4"}] * 2
    source = open_source(write(tmp_path, json.dumps(rows, indent=2)))
    assert source.rows.name == "alpaca"
    assert [document.origin for document in source.documents()] == ["a.json:1", "a.json:2"]
