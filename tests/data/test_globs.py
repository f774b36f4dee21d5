from __future__ import annotations

import pytest

from modicum.data.globs import matches, walk


@pytest.mark.parametrize(
    ("name", "pattern", "taken"),
    [
        ("a.py", "*.py", True),
        ("x/a.py", "*.py", False),
        ("x/a.py", "**/*.py", True),
        ("a.py", "**/*.py", True),
        ("x/y/a.py", "x/**", True),
        ("xy/a.py", "x/**", False),
        ("x/y/a.py", "x", True),
        ("x/y/a.py", "x/", True),
        ("x/y/a.py", "./x/*/a.*", True),
        ("x/y/z/a.py", "x/*/a.py", False),
        ("x/y/z/a.py", "x/**/a.py", True),
        ("x/a.py", "x/**/a.py", True),
        ("x/tests/a.py", "**/tests", True),
        ("a1.txt", "a[0-9].txt", True),
        ("A.TXT", "*.txt", False),
    ],
)
def test_matches(name, pattern, taken):
    assert matches(name, pattern) is taken


def test_walk_is_sorted_by_name_and_passes_hidden_files_by(tmp_path):
    for name in ("b/1", "b.x", "a", ".git/config", "b/__pycache__/x", "b/.h", "skip/1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert [name for name, _ in walk(tmp_path, leave_out=["sk*"])] == ["a", "b.x", "b/1"]
