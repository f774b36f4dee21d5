from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from modicum.cli.places import check_file, check_folder, refusal
from modicum.core.errors import InputError

LONG = "a" * 300


def test_a_place_that_takes_files_is_returned_and_left_as_it_was(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert check_file(tmp_path / "a" / "b.json") == tmp_path / "a" / "b.json"
    assert check_folder(tmp_path) == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (LONG, "300 bytes"),
        (f"there/{LONG}/x", "300 bytes"),
        ("é" * 150, "300 bytes"),
        ("/".join(["a" * 100] * 50), "too long"),
        ("file/x", "this is a file"),
        ("file", "this is a file"),
        ("loop/x", "symbolic links"),
        ("x\udcff", "not UTF-8 text"),
        ("x\0y", "zero byte"),
    ],
)
def test_a_place_that_takes_none_is_told(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match=told) as raised:
        check_folder(tmp_path / name, "--out")
    assert raised.value.field == "--out"


def test_a_file_s_place_is_no_folder_and_its_name_leaves_room_for_a_hidden_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError, match="this is a folder"):
        check_file(tmp_path)
    with pytest.raises(InputError, match="250 bytes"):
        check_file(tmp_path / ("a" * 250))
    assert check_file(tmp_path / ("a" * 235))


def test_nothing_can_be_written_into_proc() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("no such file system here")
    with pytest.raises(InputError, match="/proc"):
        check_folder("/proc/modicum")


def test_what_the_system_refuses_a_file_is_one_message_and_a_bug_is_none() -> None:
    with pytest.raises(OSError, match="too long") as raised:
        os.stat(LONG)
    assert "name too long" in str(refusal(raised.value))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "no space left" in str(refusal(full))
    assert refusal(OSError(errno.EBADF, "Bad file descriptor")) is None
    assert refusal(OSError("something")) is None


@pytest.mark.parametrize(
    "words",
    ["export {}", "chat {}", "serve {} --port 0", "merge {} --out merged", "report {}", "watch {}",
     "verify export {}", "verify resume {}", "reproduce {}", "checkpoint convert {} out"],
)  # fmt: skip
def test_a_folder_without_a_run_is_refused_with_the_nearest_run(
    modicum: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for place in (".", "runs"):
        ended = modicum(*words.format(place).split())
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
        assert ended.err.startswith(f"modicum: {place}: ")
        assert "give " in ended.err
        assert " of a run" in ended.err
        assert ", such as runs/mine" in ended.err
    assert sorted(tmp_path.rglob("*")) == before
