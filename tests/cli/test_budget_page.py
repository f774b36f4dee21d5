"""The page on budgets shows what its commands say."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_troubleshooting import matches

from modicum.cli import allocator

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "how-to" / "budget.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n\$ (.+?)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
OTHER = (ROOT / "docs" / "how-to" / "qlora-under-8gb.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name; the profile's figures are those of any machine."""
    folder = tmp_path_factory.mktemp("budget")
    (folder / "seven").mkdir()
    [config] = re.findall(r"^```json\n(.*?)^```", OTHER, re.MULTILINE | re.DOTALL)
    (folder / "seven" / "config.json").write_text(config)
    (folder / "answers.jsonl").write_text('{"text": "to be, or not to be"}\n' * 40)
    recipe = "model: {path: seven}\ndata: {path: answers.jsonl}\n"
    (folder / "seven.yaml").write_text(recipe)
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    return folder


@pytest.mark.expensive
@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_a_command_of_the_page_says_what_it_shows(
    modicum: Any, there: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    command, shown = BLOCKS[block]
    words = shlex.split(command)[1:]
    *message, code = shown.strip().split("\n")
    if "laptop-16g" in words:  # a process, which holds what its allocator makes of tensors
        if not allocator._has_huge_pages():
            pytest.skip("what the page shows is of an allocator with huge pages")
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
        called = [sys.executable, "-m", "modicum", *words]
        done = subprocess.run(called, cwd=there, capture_output=True, text=True, check=False)
        status, said = done.returncode, done.stderr + done.stdout
    else:
        monkeypatch.chdir(there)
        ended = modicum(*words)
        status, said = ended.code, ended.err + ended.out
    assert code == f"exit code {status}", said
    assert matches("\n".join(message), said.strip()), said


def test_all_figures_of_plans_are_of_commands() -> None:
    assert len(BLOCKS) == 3
    told = re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert "needs 1" not in told
    assert "Python and torch  " not in told
