from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.data import Inspection, inspect, open_source
from modicum.data.chat_template import ChatTemplate


def fill(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def origins(source) -> list[str]:
    return [document.origin for document in source.documents()]


def test_the_standard_library_is_there_and_is_all_source():
    source = open_source(None, include=["json/**", "asyncio/*.py", "argparse.py", "unittest/**"])
    names = origins(source)
    assert "json/decoder.py" in names
    assert "asyncio/events.py" in names
    assert names == sorted(names)
    assert names.count("argparse.py") == 1
    text = next(d.text for d in source.documents() if d.origin == "argparse.py")
    assert "class ArgumentParser" in text


def test_the_standard_library_leaves_out_what_is_not_its_source():
    names = [file.name for file in open_source(None).files]
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    assert not any("_sysconfigdata" in name for name in names)
    assert len(names) > 200
    assert all(name.endswith(".py") for name in names)


def test_packages_that_a_machine_lacks_are_no_error():
    whole = open_source(None, include=["json/**"])
    assert open_source(None, include=["json/**", "nowhere/**"]).files == whole.files
    with pytest.raises(InputError, match=r"chooses none of them\. Did you mean 'asyncio/\*\*'"):
        open_source(None, include=["asynio/**"])


def test_a_library_of_odd_files_never_crashes(tmp_path, monkeypatch):
    fill(tmp_path, {"good.py": "x = 1\n", "tests/bad.py": "(", "empty.py": "", "a.txt": "no"})
    (tmp_path / "odd.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "cookie.py").write_bytes(b"# coding: nonsense\n")
    (tmp_path / "linked.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert origins(open_source(None)) == ["good.py"]
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "zip")})
    with pytest.raises(InputError, match="has 0 source files"):
        open_source(None)


def test_a_folder_takes_json_lines_before_text(tmp_path):
    fill(tmp_path, {"README.md": "about\n", "b.txt": "b\n", "x/a.py": "a\n", "logo.svg": "<svg>"})
    assert origins(open_source(tmp_path)) == ["README.md", "b.txt", "x/a.py"]
    fill(tmp_path, {"x/rows.jsonl": '{"text": "row"}\n'})
    assert origins(open_source(tmp_path)) == ["x/rows.jsonl:1"]
    chosen = open_source(tmp_path, include=["*.md", "**/*.svg", "x/*"], exclude=["x"])
    assert origins(chosen) == ["README.md", "logo.svg"]


def test_a_folder_of_tables_is_read_where_no_text_but_about_them_is_there(tmp_path):
    fill(tmp_path, {"README.md": "about\n", "b.csv": "text\nb\n", "a/a.tsv": "text\na\n"})
    assert origins(open_source(tmp_path)) == ["a/a.tsv:2", "b.csv:2"]
    fill(tmp_path, {"code.py": "pass\n"})
    assert origins(open_source(tmp_path)) == ["README.md", "code.py"]
    assert origins(open_source(tmp_path, include=["**/*.csv"])) == ["b.csv:2"]


def test_inspect_reads_the_first_rows_and_no_more(tmp_path):
    rows = "".join(json.dumps({"text": "é" * n}) + "\n" for n in (1, 2, 3))
    file = fill(tmp_path, {"a.jsonl": rows + "{broken\n"}) / "a.jsonl"
    source = open_source(str(file))
    first = len(rows.encode().splitlines(keepends=True)[0])
    assert inspect(source, rows=1) == Inspection(1, first, first, complete=False)
    with pytest.raises(InputError, match=r"a\.jsonl:4: "):
        inspect(source)
    file.write_text(rows)
    seen = inspect(open_source(file), rows=3)
    assert seen == Inspection(3, len(rows.encode()), first + 12, complete=True)


def test_documents_start_anywhere_and_skip_blank_ones(tmp_path):
    fill(tmp_path, {"a.txt": "one", "b.txt": " \n\t", "c.txt": "", "d.txt": "two", "e.txt": "3"})
    source = open_source(tmp_path)
    assert origins(source) == ["a.txt", "d.txt", "e.txt"]
    assert [d.origin for d in source.documents(start=1)] == ["d.txt", "e.txt"]
    assert list(source.documents(start=9)) == []


def test_a_limit_takes_the_first_whole_documents(tmp_path):
    fill(tmp_path, {"a.txt": "a" * 10, "b.txt": "b" * 10, "c.txt": "c"})
    assert origins(open_source(tmp_path, limit_bytes=20)) == ["a.txt", "b.txt"]
    assert origins(open_source(tmp_path, limit_bytes=19)) == ["a.txt"]
    assert open_source(tmp_path, limit_bytes=19).total_bytes == 19
    assert open_source(tmp_path).total_bytes == 21
    with pytest.raises(InputError, match=r"\(a\.txt\) alone has 10 bytes, .* limit of 9 bytes"):
        inspect(open_source(tmp_path, limit_bytes=9))


def test_a_long_single_file_can_be_split_for_validation(tmp_path):
    file = fill(tmp_path, {"all.txt": "To be, or not to be.\n\n" * 9000}) / "all.txt"
    assert len(origins(open_source(file))) == 4
    assert origins(open_source(tmp_path)) == ["all.txt"]


def test_the_fingerprint_follows_names_contents_and_settings(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        fill(folder, {"a.jsonl": '{"text": "x"}\n', "b.jsonl": '{"text": "y"}\n'})
    print_of = open_source(first).fingerprint()
    assert open_source(second).fingerprint() == print_of
    assert open_source(first, column="other").fingerprint() != print_of
    assert open_source(first, limit_bytes=100).fingerprint() != print_of
    (second / "b.jsonl").write_text('{"text": "z"}\n')
    assert open_source(second).fingerprint() != print_of
    (first / "b.jsonl").rename(first / "c.jsonl")
    assert open_source(first).fingerprint() != print_of


def test_describe_says_what_is_read(tmp_path):
    file = fill(tmp_path, {"a.jsonl": '{"text": "x"}\n'}) / "a.jsonl"
    source = open_source(file, column="text", prompt_column="q", limit_bytes=5000)
    assert source.describe() == f"{file}, column 'text' after 'q': 1 file, 14 B (limited)"
    assert "standard library: " in open_source(None, include=["json/**"]).describe()


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("dta", {}, r"recipe\.yaml: data\.path: there is no such file or folder .*mean 'data'\?"),
        ("dta/x/y.txt", {}, r"there is no such .*Did you mean 'data'\?"),
        ("bare", {}, r"no file in the folder is JSONL, text or a table; it is empty"),
        ("data", {"include": ["*.txd"]}, r"matches '\*\.txd'; it has 1 files, such as 'a\.txt'"),
        ("data", {"exclude": ["**"]}, r"is JSONL, text or a table and escapes '\*\*'"),
        ("a.xlsx.bz2", {}, r"\.bz2 files cannot be read; .*allowed: a folder, a UTF-8 text"),
        ("data", {"prompt_column": "q"}, r"text files have no columns"),
    ],
)
def test_what_cannot_be_opened_is_said(tmp_path, path, options, message):
    fill(tmp_path, {"data/a.txt": "text", "a.xlsx.bz2": "no table"})
    (tmp_path / "bare").mkdir()
    with pytest.raises(InputError, match=message):
        open_source(tmp_path / path, recipe_file="recipe.yaml", **options)


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", ""), ("a.txt", " \n"), ("a.jsonl", '{"text": ""}\n\n')]
)
def test_data_without_text_is_an_error(tmp_path, name, content):
    source = open_source(fill(tmp_path, {name: content}) / name)
    with pytest.raises(InputError, match=rf"{name}: there is no text in it"):
        inspect(source)


def test_a_template_for_tools_counts_where_rows_come_with_some(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    plain, tools = tmp_path / "plain.jsonl", tmp_path / "tools.jsonl"
    plain.write_text(json.dumps(talk) + "\n")
    tools.write_text(json.dumps(talk | {"tools": [{"name": "f"}]}) + "\n")
    one, other = ChatTemplate("d"), ChatTemplate("d", tool_use="t")
    for file, same in ((plain, True), (tools, False)):
        found = {open_source(file, template=each).fingerprint() for each in (one, other)}
        assert (len(found) == 1) is same
