"""Completion: what each shell's script asks for is answered, and by a shell that is here, shown."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import modicum as package
from modicum.cli.completion import VARIABLE, method_names, script
from modicum.core.errors import InputError

SHELLS = ("bash", "zsh", "fish")


def answer(shell: str, words: str, **more: str) -> list[str]:
    """What a command says to a shell's script that has these words, the last one unfinished."""
    split = words.split(" ")
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(split) - 1), "_TYPER_COMPLETE_ARGS": words}
    ended = subprocess.run(
        [sys.executable, "-m", "modicum"],
        env=os.environ | {VARIABLE: f"complete_{shell}"} | asked | more,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.stderr == ""
    return ended.stdout.split() if shell == "bash" else ended.stdout.splitlines()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_of_the_shell_and_asks_modicum(modicum: Any, shell: str) -> None:
    ended = modicum("completion", shell)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == script(shell) + "\n"
    assert f"{VARIABLE}=complete_{shell}" in ended.out
    assert {"bash": "complete -o default", "zsh": "compdef", "fish": "--command modicum"}[
        shell
    ] in ended.out
    if (found := shutil.which(shell)) is not None:
        checked = subprocess.run([found, "-n"], input=ended.out, text=True, check=False)
        assert checked.returncode == 0


def test_another_shell_is_wrong_input(modicum: Any) -> None:
    ended = modicum("completion", "csh")
    assert ended.code == 2
    assert "allowed: bash, zsh, fish" in ended.err


@pytest.mark.expensive
def test_bash_is_answered() -> None:
    assert answer("bash", "modicum tr") == ["train"]
    assert answer("bash", "modicum train --dry") == ["--dry-run"]
    assert answer("bash", "modicum prove pis") == ["pissa"]
    assert answer("bash", "modicum methods --room adap") == ["adapters"]
    assert answer("bash", "modicum train nothing-such") == []  # bash then offers files


@pytest.mark.expensive
def test_zsh_is_answered() -> None:
    [line, *_] = answer("zsh", "modicum compl")
    assert line.startswith("""_arguments '*: :(("completion":"Print what lets a shell""")
    assert answer("zsh", "modicum train nothing-such") == ["_files"]


@pytest.mark.expensive
def test_fish_is_answered() -> None:
    [line] = answer("fish", "modicum compl", _TYPER_COMPLETE_FISH_ACTION="get-args")
    assert line.startswith("completion\tPrint what lets a shell")


@pytest.mark.expensive
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_itself_completes(tmp_path: Path) -> None:
    command = tmp_path / "modicum"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m modicum "$@"\n')
    command.chmod(0o755)
    tried = (
        'eval "$(modicum completion bash)"; COMP_WORDS=(modicum doc); COMP_CWORD=1; '
        "_modicum_completion modicum; echo ${COMPREPLY[@]}"
    )
    sources = Path(package.__file__).parents[1]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(sources)}
    ended = subprocess.run(
        ["bash", "--norc", "-c", tried],
        env=os.environ | path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("doctor\n", "")


def test_what_cannot_be_read_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise InputError("an entry point is broken")

    monkeypatch.setattr("modicum.core.contracts.catalog.catalog", broken)
    assert list(method_names("")) == []
