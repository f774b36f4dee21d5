from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.data import csv_rows as module
from modicum.data import inspect, open_source
from modicum.data.csv_rows import csv_rows

CELL = st.text(st.sampled_from('ab ,\t"\né€'), max_size=8)


def read(tmp_path: Path, text: str, delimiter: str = ",") -> list[tuple[int, dict[str, object]]]:
    file = tmp_path / "data.csv"
    file.write_bytes(text.encode())
    return [(row.number, row.columns) for row in csv_rows(file, delimiter)]


@given(st.lists(st.tuples(CELL, CELL), max_size=5), st.sampled_from(",\t"))
def test_what_csv_writes_is_read_with_all_its_bytes(tmp_path_factory, rows, delimiter):
    file = tmp_path_factory.mktemp("table") / "a.csv"
    with open(file, "w", newline="", encoding="utf-8-sig") as handle:
        csv.writer(handle, delimiter=delimiter).writerows([("q", "a"), *rows])
    found = list(csv_rows(file, delimiter))
    assert [tuple(row.columns.values()) for row in found] == rows
    assert all(list(row.columns) == ["q", "a"] for row in found)
    header = len("\ufeff".encode()) + 5
    assert sum(row.size for row in found) == file.stat().st_size - header


def test_a_row_is_named_by_its_first_line(tmp_path):
    text = 'q,a\r\n"two\nlines","say ""so"""\r\n\r\nx,"y, z"\r\n'
    assert read(tmp_path, text) == [
        (2, {"q": "two\nlines", "a": 'say "so"'}),
        (5, {"q": "x", "a": "y, z"}),
    ]


def test_the_row_numbers_that_pandas_writes_are_left_out(tmp_path):
    assert read(tmp_path, ",text\n0,one\n") == [(2, {"text": "one"})]


def test_a_cell_longer_than_the_limit_of_csv_itself_is_read(tmp_path):
    assert read(tmp_path, f"text\n{'x' * 200_000}\n") == [(2, {"text": "x" * 200_000})]


def test_a_conversation_is_json_in_its_cell(tmp_path):
    turns = '"[{""role"": ""user"", ""content"": ""hi""}]"'
    ((_, columns),) = read(tmp_path, f"messages,note\n{turns},[1]\n")
    assert columns == {"messages": [{"role": "user", "content": "hi"}], "note": "[1]"}
    with pytest.raises(InputError, match=r"data\.csv:2: messages: the cell is not valid JSON"):
        read(tmp_path, "messages\n[broken\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,2,3\n", r"data\.csv:3: the row has 3 cells and the header 2"),
        ("a,b\n1\n", r":2: the row has 1 cells and the header 2"),
        ('a,b\n"1\n2",3\n"x,y\n', r":4: the row is not valid CSV: a quoted cell does not end"),
        ('a,b\n"x" y,1\n', r":2: the row is not valid CSV: ',' expected after"),
        ("0,1\n1,2\n", r":1: the first line .*'0' is a number"),
        ("id,\n1,2\n", r":1: the first line .*a name is empty"),
        ("a,a\n1,2\n", r":1: the first line .*a name stands twice"),
        ("a;b\n1;2\n", r":1: the first line .*its one name holds ';'"),
        (f"id,{'word ' * 30}\n", r":1: the first line .*as long as a text"),
    ],
)
def test_what_is_no_table_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, text)


def test_bytes_that_are_not_utf8_are_named_by_line_and_offset(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b"a,b\n1,caf\xe9\n")
    with pytest.raises(InputError, match=r"a\.csv:2: byte 0xe9 at offset 9 is not UTF-8"):
        list(csv_rows(file, ","))


def test_a_quote_that_is_left_open_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_ROW", 1000)
    usual = csv.field_size_limit(1000)
    try:
        file = tmp_path / "a.csv"
        file.write_bytes(b'a\n"' + b"x\n" * 1000 + b"\xff")  # which is not reached
        with pytest.raises(InputError, match=r":2: .*a quoted cell does not end"):
            list(csv_rows(file, ","))
    finally:
        csv.field_size_limit(usual)


def test_a_row_of_lines_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_ROW", 10)
    with pytest.raises(InputError, match=r":3: the row is longer than"):
        read(tmp_path, "a,b\n1,2\n" + '"x\n",' * 9 + "\n")


def test_a_table_is_rows_to_a_source(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text("prompt,completion\n2+2?,4\n")
    source = open_source(file)
    (document,) = source.documents()
    assert (document.prompt, document.text, document.origin) == ("2+2?", "4", "data.csv:2")
    assert not source.continuous
    assert source.rows.name == "prompt_completion"
    file.write_text("q\tnote\n")
    with pytest.raises(InputError, match=r"data\.csv:1: data\.path: the first line"):
        open_source(file)
    file.write_text("question,note\n2+2?,4\n")
    with pytest.raises(InputError, match=r"data\.csv:2: text: .* 'question', 'note'"):
        inspect(open_source(file))
