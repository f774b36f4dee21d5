"""A folder belongs to one process; a disk that keeps no locks, or is full, is one sentence."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.core.folder_lock import LOCK, locked_folder


def hold(folder: Path) -> str:
    """What the lock says while the folder is held."""
    with locked_folder(folder, "run"):
        return (folder / LOCK).read_text()


def failing(number: int) -> Callable[..., None]:
    def call(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_who_comes_second_is_refused_with_who_holds_it(tmp_path: Path) -> None:
    own = f"process {os.getpid()}"
    with locked_folder(tmp_path, "run"), pytest.raises(InputError, match=f"in use by {own};"):
        hold(tmp_path)
    assert [hold(tmp_path), hold(tmp_path)] == [own, own]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_disk_that_keeps_no_locks_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(InputError, match=r"this disk keeps no locks .* on another disk"):
        hold(tmp_path)


def test_a_disk_that_is_full_as_the_lock_is_written_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "ftruncate", failing(errno.ENOSPC))
    with pytest.raises(InputError, match="the disk is full"):
        hold(tmp_path)
