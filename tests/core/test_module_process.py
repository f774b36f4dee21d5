"""A module in a process of its own, whatever lies in the current folder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from modicum.core.module_process import module_command

MODULE = """
import json, queue, secrets, sys
from told_package import WORD
print(json.dumps([__name__, WORD, sys.argv[1:], secrets.token_hex(1) != "", queue.Queue().qsize()]))
"""


def said(*words: str, folder: Path) -> list[object]:
    command = module_command("told_module", *words)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("of_a_script", [False, True])
def test_files_with_the_names_of_standard_modules_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_a_script: bool
) -> None:
    folder, packages = tmp_path / "work", tmp_path / "packages"
    for one in (folder, packages):
        one.mkdir()
    for name in ("secrets", "queue", "runpy", "json"):
        (folder / f"{name}.py").write_text("raise RuntimeError('this is another file')\n")
    (packages / "told_module.py").write_text(MODULE)
    (packages / "told_package.py").write_text("WORD = 'found'\n")
    # As `sys.path.insert(0, ...)` in a script, whose own folder is found first as well.
    monkeypatch.syspath_prepend(packages)
    if of_a_script:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    assert said("one", "two words", folder=folder) == [
        "__main__", "found", ["one", "two words"], True, 0,
    ]  # fmt: skip
