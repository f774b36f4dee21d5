"""What is in a folder that was given for a file."""

from __future__ import annotations

from pathlib import Path

from modicum.core.folder_words import holds


def test_files_are_named_up_to_a_handful(tmp_path: Path) -> None:
    assert holds(tmp_path, [".py"]) == holds(tmp_path / "none", [".py"]) == ""
    for name in ("a.py", ".hidden.py", "c.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder.py").mkdir()
    assert holds(tmp_path, [".py"], "plugin") == f"; give a plugin of it: {tmp_path / 'a.py'}"
    for place in range(8):
        (tmp_path / f"b{place}.py").touch()
    assert holds(tmp_path, [".py"]).endswith("b4.py and 3 more")
