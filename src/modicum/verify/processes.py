"""Stretches of a run in processes of their own: one, or as many ranks as it has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from modicum.core.errors import InputError, Interrupted, ModicumError
from modicum.core.files import read_json, write_json
from modicum.parallel.launch import Supervisor
from modicum.verify.stretch import Stretch

_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def launched(stretch: Stretch) -> None:
    """Do a stretch in processes that end with it.

    Raises:
        InputError: it says what is wrong.
        Interrupted: a signal came.
        ModicumError: a process ended without a word.
    """
    file = stretch.folder / ".stretch.json"
    stretch.save(file)
    code, said = run_command(["verify", "stretch", str(file)], stretch.ranks)
    file.unlink()
    if not code:
        return
    if stretch.failure.is_file():
        told = read_json(stretch.failure)
        stretch.failure.unlink()
        if told["code"] == Interrupted.exit_code:
            raise Interrupted(told["problem"])
        raise InputError(told["problem"])
    raise ModicumError(f"a process ended with exit code {code}{said}")


def run_command(words: Sequence[str], ranks: int) -> tuple[int, str]:
    """Run a `modicum` command in so many processes; its exit code, and what is said of ranks."""
    # `-m` looks into the current folder first, where a file may have any module's name.
    where = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    command = [sys.executable, *where, "-m", "modicum", *words]
    own = {name: value for name, value in os.environ.items() if name not in _RANK}
    if ranks == 1:
        return subprocess.run(
            command, env=own, stdin=subprocess.DEVNULL, check=False
        ).returncode, ""
    said: list[str] = []
    code = Supervisor(command, ranks, environment=own, say=said.append).run()
    return code, "".join(f"; {each}" for each in said)


def note_failure(file: Path, error: ModicumError) -> None:
    """Leave word of what went wrong, for the process that started this one."""
    if not file.is_file():
        write_json(file, {"problem": str(error), "code": error.exit_code})
