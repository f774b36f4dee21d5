from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.data.library_functions import library_functions, write_functions

_SAME = "def f():\n    return 'more than eighty characters: " + "x" * 60 + "'\n"
_INNER = "        def inner():\n            return 'x' * 80 + 'and more'\n"
FILES = {
    "a/one.py": _SAME,
    "a/two.py": "class C:\n    def g(self):\n        '''\x0c'''\n        x = 1\n" + _INNER,
    "b/one.py": "async def h():\n" + "    await nothing()\n" * 9,
    "b/two.py": _SAME + "def k():\n" + "    nothing()\n" * 9 + "def short(): pass\n",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of two packages."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(
        "modicum.data.source_files.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)}
    )
    return tmp_path


def test_functions_are_dedented_and_each_text_is_there_once(library: Path) -> None:
    sides = library_functions(["a", "b"])
    rows = [row for side in sides.values() for row in side]
    assert Counter(row.text.split("(")[0] for row in rows) == {
        "def f": 1, "def g": 1, "async def h": 1, "def k": 1,
    }  # fmt: skip
    [method] = [row for row in rows if row.text.startswith("def g")]
    assert method.text.split("\n")[1] == "    '''\x0c'''"
    assert method.text.endswith("return 'x' * 80 + 'and more'")
    assert (method.label, method.file) == ("a", "a/two.py")


def test_no_file_is_on_both_sides_of_the_real_library() -> None:
    sides = library_functions(["logging", "http"])
    files = [{row.file for row in rows} for rows in sides.values()]
    assert all(files)
    assert not files[0] & files[1]
    assert {row.label for row in sides["validation"]} == {"logging", "http"}
    assert max(Counter(row.label for row in sides["train"]).values()) <= 160
    assert sides == library_functions(["logging", "http"])


def test_rows_are_written_into_a_new_folder_alone(library: Path, tmp_path: Path) -> None:
    counts = write_functions(tmp_path / "rows", ["a", "b"])
    for side, count in counts.items():
        lines = (tmp_path / "rows" / f"{side}.jsonl").read_text().splitlines()
        assert [set(json.loads(line)) for line in lines] == [{"text", "label", "file"}] * count
    with pytest.raises(InputError, match="something already"):
        write_functions(tmp_path / "rows")


def test_a_library_without_sources_is_refused(library: Path) -> None:
    with pytest.raises(InputError, match="chooses none of them"):
        library_functions(["c"])
