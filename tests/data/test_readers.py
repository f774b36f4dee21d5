from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.data import open_source
from modicum.data.readers import Document, read_python, read_rows, read_text
from modicum.data.row_files import rows_of
from modicum.data.row_formats import RowFormat


def read_jsonl(path: Path, name: str, document: Callable[..., Document]) -> Iterator[Document]:
    return (each.make() for each in read_rows(rows_of(path, "jsonl"), path, name, document))


def test_a_text_file_is_one_document(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffgrün\r\n".encode())
    (document,) = read_text(file, "a.txt", 1000)
    assert (document.text, document.prompt, document.origin) == ("grün\r\n", None, "a.txt")
    assert document.size == 10  # the byte order mark and the umlaut count in bytes


@given(
    st.text(st.sampled_from("ab \n\né€😀"), max_size=300),
    st.integers(min_value=8, max_value=40),
)
def test_pieces_of_a_long_file_are_the_file(tmp_path_factory, text, piece):
    file = tmp_path_factory.mktemp("pieces") / "a.txt"
    file.write_bytes(text.encode())
    documents = list(read_text(file, "a.txt", piece))
    assert "".join(document.text for document in documents) == text
    assert sum(document.size for document in documents) == len(text.encode())
    assert all(0 < document.size <= piece for document in documents)


def test_pieces_are_cut_after_blank_lines_and_named_by_line(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\n\nthree\nfour\n\nfive\n")
    documents = list(read_text(file, "a.txt", 14))
    assert [(d.text, d.origin) for d in documents] == [
        ("one\ntwo\n\n", "a.txt"),
        ("three\nfour\n\n", "a.txt:4"),
        ("five\n", "a.txt:7"),
    ]


@pytest.mark.parametrize("piece", [16, 1000])
def test_what_is_not_utf8_is_named_by_line_and_offset(tmp_path, piece):
    file = tmp_path / "a.txt"
    file.write_bytes(b"first line\nsecond line\nthird caf\xe9\n")
    with pytest.raises(InputError, match=r"a\.txt:3: byte 0xe9 at offset 32 is not UTF-8"):
        list(read_text(file, "a.txt", piece))


def test_a_python_file_is_decoded_as_it_declares(tmp_path):
    latin, broken = tmp_path / "latin.py", tmp_path / "broken.py"
    latin.write_bytes(b"# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n")
    broken.write_bytes(b"name = 'caf\xe9'\n")
    (document,) = read_python(latin, "latin.py")
    assert document.text.endswith("'café'\n")
    assert list(read_python(broken, "broken.py")) == []


def test_rows_are_read_with_their_prompts(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [{"q": "2+2?", "a": "4"}, {"q": "é", "a": "😀", "more": [1]}]
    file.write_text("\n\n".join(json.dumps(row) for row in rows))
    documents = list(read_jsonl(file, "a.jsonl", RowFormat(column="a", prompt_column="q").document))
    assert [(d.prompt, d.text, d.origin) for d in documents] == [
        ("2+2?", "4", "a.jsonl:1"),
        ("é", "😀", "a.jsonl:3"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r":2: the line is not valid JSON: Unterminated string.* \(column 10\)"),
        ('{"txet": "x", "n": 1}', r":2: text: .*'txet', 'n'\. Did you mean 'txet'\?"),
        ("{}", r":2: text: the row has no such column; .* none"),
        ('{"text": 7}', r":2: text: the column holds a number \(found: 7\); allowed: a string"),
        ('{"text": null}', r":2: text: the column holds null"),
        ('["text"]', r":2: the line holds a list, not an object"),
        ("3", r":2: the line holds a number, not an object"),
        ('{"text": "a\\ud800"}', r":2: text: character 1 is half a surrogate pair"),
        ("[" * 100_000, r":2: the line is not valid JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(InputError, match=message):
        list(read_jsonl(file, "a.jsonl", RowFormat().document))


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(InputError, match=r":2: byte 0xe9 at offset 30 is not UTF-8"):
        list(read_jsonl(file, "a.jsonl", RowFormat().document))


def test_one_json_value_over_many_lines_is_recognised(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"text": "x"}], indent=1))
    with pytest.raises(InputError, match=r":1: .* write one object a line"):
        list(read_jsonl(file, "a.json", RowFormat().document))


def test_a_file_that_has_gone_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"gone\.txt: cannot be read: No such file"):
        list(read_text(tmp_path / "gone.txt", "gone.txt", 100))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.txt", "a"])
@pytest.mark.parametrize("skip", [0, 1, 5, 6, 9])
def test_reading_begins_after_some_documents(tmp_path, name, skip):
    rows = [{"text": f"line {n}"} for n in range(6)]
    lines = "".join(json.dumps(row) + "\n\n" for row in rows)
    file = tmp_path / name
    if name == "a":
        file.mkdir()
        (file / "b.jsonl").write_text(lines)
    elif name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines.encode()))
    elif name == "a.csv":
        file.write_text("text\n" + "".join(row["text"] + "\n" for row in rows))
    elif name == "a.txt":
        file.write_text("some words\n\n" * 30_000)
    else:
        file.write_text(json.dumps(rows) if name == "a.json" else lines)
    source = open_source(file)
    found = [unmade.make() for unmade in source.read(0, skip)]
    assert found == [unmade.make() for unmade in source.read(0)][skip:]
    assert len(found) == max(6 - skip, 0)
