from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.data import inspect, open_source
from modicum.data.arrow_rows import arrow_rows, parquet_rows
from modicum.data.row_files import rows_of

ROWS = [{"prompt": f"{n}+1?", "completion": f"{n + 1} €", "n": n} for n in range(700)]
CHAT = [
    {"role": "user", "content": "hi", "tool_calls": None},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
]


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path, **options)
        return path
    make = pyarrow.ipc.new_file if options.get("file") else pyarrow.ipc.new_stream
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    return path


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.parquet", {"row_group_size": 300}),
        ("a.parquet", {"compression": "zstd"}),
        ("a.arrow", {}),
        ("a.arrow", {"file": True}),
    ],
)
def test_rows_are_those_of_json_lines(tmp_path, name, options):
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = open_source(write(tmp_path / name, ROWS, **options))
    found, wanted = list(source.documents()), list(open_source(lines).documents())
    assert [(d.prompt, d.text) for d in found] == [(d.prompt, d.text) for d in wanted]
    # Of Parquet the columns that are not used are not read, and have no size.
    used = ("prompt", "completion") if name == "a.parquet" else ("prompt", "completion", "n")
    sizes = [len(json.dumps({name: row[name] for name in used})) for row in ROWS]
    assert [d.size for d in found] == sizes
    assert found[-1].origin == f"{name}:700"
    assert source.rows.name == "prompt_completion"
    assert source.total_bytes == pytest.approx(sum(d.size for d in found), rel=0.05)


@pytest.mark.parametrize(("name", "kind"), [("a.parquet", "parquet"), ("a.arrow", "arrow")])
@pytest.mark.parametrize("skip", [0, 1, 299, 300, 301, 650, 700, 800])
def test_rows_that_are_passed_by_keep_their_numbers(tmp_path, name, kind, skip):
    options = {"row_group_size": 300} if kind == "parquet" else {}
    file = write(tmp_path / name, ROWS, **options)
    assert list(rows_of(file, kind, skip=skip)) == list(rows_of(file, kind))[skip:]


def test_columns_that_are_not_used_are_not_read(tmp_path, monkeypatch):
    source = open_source(write(tmp_path / "a.parquet", ROWS, row_group_size=300))
    asked = []
    library = pytest.importorskip("pyarrow.parquet")
    plain = library.ParquetFile.iter_batches

    def spied(file, *arguments, **options):
        asked.append((options["columns"], options["row_groups"]))
        return plain(file, *arguments, **options)

    monkeypatch.setattr(library.ParquetFile, "iter_batches", spied)
    assert len(list(source.read(0, skip=310))) == 390
    assert asked == [(["prompt", "completion"], [1, 2])]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_conversations_are_lists_of_objects_without_what_is_null(tmp_path, name):
    file = write(tmp_path / name, [{"messages": CHAT, "note": None}])
    rows = parquet_rows if name == "a.parquet" else arrow_rows
    ((_, columns, _),) = rows(file)
    assert columns["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
    ]
    assert columns["note"] is None
    assert open_source(file).rows.name == "messages"


def test_what_is_no_text_is_refused_with_its_row(tmp_path):
    rows = [{"text": datetime.date(2026, 1, 1)}, {"text": datetime.date(2026, 1, 2)}]
    file = write(tmp_path / "a.parquet", rows)
    with pytest.raises(InputError, match=r"a\.parquet:1: text: .* a value of type date"):
        inspect(open_source(file))
    file = write(tmp_path / "b.parquet", [{"text": "x"}, {"text": None}])
    with pytest.raises(InputError, match=r"b\.parquet:2: text: the column holds null"):
        inspect(open_source(file))
    with pytest.raises(InputError, match=r"b\.parquet:1: body: .* 'text'"):
        inspect(open_source(file, column="body"))


def test_a_date_that_python_has_not_is_refused_with_its_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    days = pyarrow.array([0, 2**31 - 1], pyarrow.int32()).cast(pyarrow.date32())
    table = pyarrow.table({"text": ["x", "y"], "day": days})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet:1: a value in this row or the 255 after it"):
        list(parquet_rows(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("damage", ["truncated", "other", "empty"])
def test_a_damaged_file_is_refused(tmp_path, name, damage):
    file = write(tmp_path / name, ROWS)
    content = {"truncated": file.read_bytes()[:-2000], "other": b'{"text": 1}\n' * 50, "empty": b""}
    file.write_bytes(content[damage])
    with pytest.raises(InputError, match=rf"{name}: .*(cannot be read as|does not end)"):
        inspect(open_source(file))


def test_a_stream_that_stops_between_two_batches_is_refused(tmp_path):
    file = write(tmp_path / "a.arrow", ROWS)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"a\.arrow: .*does not end"):
        inspect(open_source(file))


def test_two_columns_of_one_name_are_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table([["x"], ["y"]], names=["text", "text"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet.*text: two columns have this name"):
        open_source(tmp_path / "a.parquet")


def test_parquet_is_not_packed_again(tmp_path):
    file = tmp_path / "a.parquet.gz"
    file.write_bytes(b"\x1f\x8b")
    with pytest.raises(InputError, match="compressed inside"):
        open_source(file)


def test_a_folder_is_read_for_its_parquet_files(tmp_path):
    write(tmp_path / "train.parquet", ROWS)
    (tmp_path / "README.md").write_text("about")
    assert [file.kind for file in open_source(tmp_path).files] == ["parquet"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_without_the_library_the_message_says_what_to_install(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(InputError, match=rf"{name}.*needs pyarrow.*pip install 'modicum\[data\]'"):
        inspect(open_source(tmp_path / name))
