"""The commands of the page on troubleshooting end as the page says."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from modicum.recipe_yaml import load
from modicum.trainer.folder import METRICS, RunFolder

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "troubleshooting.md"
BLOCKS = re.findall(r"^```console\n\$ (.+?)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
FORKS = re.findall(r"^modicum train (.+ --fork runs/first)$", PAGE.read_text(), re.MULTILINE)


def matches(shown: str, said: str) -> bool:
    """Whether what was said is what is shown, `...` being anything within a message."""
    return re.fullmatch(".*?".join(map(re.escape, shown.split("..."))), said, re.DOTALL) is not None


def test_what_is_left_out_is_left_out_alone() -> None:
    assert matches("a ... c", "a b c")
    assert not matches("a ... c", "a b d")
    assert not matches("a", "a b")


@pytest.fixture(scope="module")
def there(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the page's commands name."""
    folder = tmp_path_factory.mktemp("troubles")
    shutil.copy(runs.recipe, folder / "recipe.yaml")
    shutil.copytree(runs.new, folder / "runs" / "first")
    (folder / "broken.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (folder / "answers.jsonl").write_text('{"answer": "one"}\n' * 9)
    locked = folder / "runs" / "locked"
    locked.mkdir()
    with open(locked / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 7")
        lock.flush()
        yield folder


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_command_of_the_page_ends_as_it_says(
    modicum: Any, there: Path, monkeypatch: pytest.MonkeyPatch, command: str, shown: str
) -> None:
    if "device=cuda" in command and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if "wandb" in command and find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    monkeypatch.chdir(there)
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    before = sorted(os.listdir(there / "runs"))
    ended = modicum(*words[1:])
    *message, code = shown.strip().split("\n")
    assert code == f"exit code {ended.code}", ended.err
    assert matches("\n".join(message), (ended.err + ended.out).strip())
    if ended.code:
        new = set(os.listdir(there / "runs")) - set(before)
        assert not [name for name in new if (there / "runs" / name / "metrics.jsonl").exists()]


@pytest.mark.expensive
def test_what_is_changed_in_a_run_that_stopped_continues_as_a_fork(
    modicum: Any, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own folder it is refused."""
    monkeypatch.chdir(there)
    assert len(FORKS) == 2
    for words in FORKS:
        # This process holds what all tests load, and the run here has come to its end.
        typed = shlex.split(words.replace("4GB", "64GB"))
        forked = modicum("train", *typed, "--set", "training.steps=4", "--quiet")
        assert forked.code == 0, forked.err
        change = typed[typed.index("--set") + 1]
        refused = modicum("train", typed[0], "--out", "runs/first", "--set", change)
        assert refused.code == 2
        assert f"Changed: {change.partition('=')[0]}: " in refused.err


def test_a_run_without_a_step_takes_another_budget_in_its_own_folder(there: Path) -> None:
    folder = there / "runs" / "killed"
    shutil.copytree(there / "runs" / "first", folder)
    recipe = load(there / "recipe.yaml").changed(budget__memory="4GB")
    assert not RunFolder(folder).may_begin(recipe)
    (folder / METRICS).unlink()
    shutil.rmtree(folder / "checkpoints")
    assert RunFolder(folder).may_begin(recipe)
    assert "takes the new budget in its own folder" in " ".join(PAGE.read_text().split())
