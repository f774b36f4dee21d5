from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from modicum.core.errors import InputError
from modicum.core.files import (
    check_replaced,
    disk_errors,
    file_digest,
    located,
    publish_folder,
    read_json,
    write_json,
    write_text,
)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def publish(target: Path, text: str) -> None:
    with publish_folder(target) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "a").write_text(text)


def test_a_file_is_replaced_whole(tmp_path):
    write_text(tmp_path / "a", "one")
    write_json(tmp_path / "b", {"é": 1})
    write_text(tmp_path / "a", "two")
    assert contents(tmp_path) == {"a": "two", "b": '{\n  "é": 1\n}\n'}
    assert json.loads((tmp_path / "b").read_text()) == {"é": 1}


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path):
    write_json(tmp_path / "a.json", {"text": json.loads('"\\ud800 é"')})
    content = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert "\\ud800 é" in content
    assert json.loads(content) == {"text": "\ud800 é"}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_text(tmp_path / "a", "one")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        write_text(tmp_path / "a", "two")
    assert contents(tmp_path) == {"a": "one"}


def test_a_folder_is_published_whole_and_replaces_the_old(tmp_path):
    publish(tmp_path / "x", "one")
    publish(tmp_path / "x", "two")
    assert contents(tmp_path) == {"x/inner/a": "two"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    "said",
    [
        "I/O error: No space left on device (os error 28)",
        'Error: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
    ],
)
def test_each_way_in_which_safetensors_tells_of_a_full_disk_is_understood(tmp_path, said):
    with pytest.raises(InputError, match="the disk is full"), disk_errors(tmp_path):
        raise SafetensorError(said)


def fail(target: Path) -> None:
    with publish_folder(target) as temporary:
        (temporary / "a").write_text("half")
        raise KeyError


def test_a_block_that_raises_leaves_the_old_folder(tmp_path):
    publish(tmp_path / "x", "one")
    with pytest.raises(KeyError):
        fail(tmp_path / "x")
    assert contents(tmp_path) == {"x/inner/a": "one"}


DIE = """
import os, sys
from pathlib import Path
from modicum.core import files
target, calls, at = Path(sys.argv[1]), 0, int(sys.argv[2])

def counted(function):
    def call(*arguments, **named):
        global calls
        calls += 1
        if calls == at:
            os._exit(9)
        return function(*arguments, **named)
    return call

os.fsync, os.replace = counted(os.fsync), counted(os.replace)
with files.publish_folder(target) as temporary:
    (temporary / "inner").mkdir()
    (temporary / "inner" / "a").write_text("two")
"""


def test_a_process_that_dies_leaves_the_old_folder_or_the_new(tmp_path):
    # Death before each of the system calls in turn: three syncs, two renames, a sync.
    for at in range(1, 8):
        target = tmp_path / str(at) / "x"
        publish(target, "one")
        code = subprocess.run([sys.executable, "-c", DIE, target, str(at)], check=False).returncode
        assert code == (9 if at < 7 else 0)
        if at == 5:  # between the renames: the old one waits under its hidden name
            assert not target.exists()
            with pytest.raises(KeyError):
                fail(target)
        assert contents(target) == {"inner/a": "one" if at < 6 else "two"}
        publish(target, "three")
        assert contents(target.parent) == {"x/inner/a": "three"}


def test_half_of_an_old_folder_is_never_put_back(tmp_path, monkeypatch):
    publish(tmp_path / "x", "one")
    with monkeypatch.context() as patched:  # as if the process died before it removed anything
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        publish(tmp_path / "x", "two")
    (tmp_path / "x").rename(tmp_path / "elsewhere")
    with pytest.raises(KeyError):
        fail(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    publish(tmp_path / "x", "three")
    assert contents(tmp_path) == {"elsewhere/inner/a": "two", "x/inner/a": "three"}


def test_a_folder_is_published_where_a_link_leads(tmp_path):
    publish(tmp_path / "real", "one")
    (tmp_path / "link").symlink_to("real")
    publish(tmp_path / "link", "two")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "real") == {"inner/a": "two"}
    assert {path.name for path in tmp_path.iterdir()} == {"link", "real"}


def test_a_file_and_the_folder_that_the_process_runs_in_are_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="a folder is needed, and this is a file"):
        publish(tmp_path / "file", "one")
    (tmp_path / "x" / "y").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "x" / "y")
    for target in (Path("."), Path(".."), tmp_path / "x"):
        with pytest.raises(InputError, match="this process runs in the folder"):
            publish(target, "one")
    publish(Path("new"), "one")
    assert contents(tmp_path) == {"file": "mine", "x/y/new/inner/a": "one"}


def test_what_macos_writes_into_a_folder_is_no_other_file(tmp_path: Path) -> None:
    for name in ("own", ".DS_Store"):
        (tmp_path / name).touch()
    check_replaced(tmp_path, "model", lambda found: found - {"own"})
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match=r"holds other files too.*found: 'mine'"):
        check_replaced(tmp_path, "model", lambda found: found - {"own"})


def failing(path: Path, number: int) -> None:
    with disk_errors(path):
        raise OSError(number, "no")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_so(tmp_path, number):
    with pytest.raises(InputError, match=r"the disk is full \(\d+ bytes free\)") as caught:
        failing(tmp_path / "not" / "there" / "yet", number)
    assert caught.value.exit_code == 2


def test_a_disk_that_cannot_be_written_is_said_so(tmp_path):
    with pytest.raises(InputError, match="permissions"):
        failing(tmp_path, errno.EACCES)
    with pytest.raises(FileNotFoundError):
        failing(tmp_path, errno.ENOENT)


def save(folder: Path) -> None:
    with publish_folder(folder) as temporary:
        save_file({"w": torch.zeros(1 << 20)}, temporary / "w")


def test_tensors_that_do_not_fit_the_disk_are_said_so(tmp_path, full_disk):
    # safetensors raises an error of its own, which is no OSError.
    with pytest.raises(InputError, match="the disk is full"):
        save(full_disk / "x")
    assert list(full_disk.iterdir()) == []


def test_text_that_does_not_fit_the_disk_leaves_the_old_file(full_disk):
    write_text(full_disk / "a", "one")
    with pytest.raises(InputError, match="the disk is full"):
        write_text(full_disk / "a", "x" * (1 << 20))
    assert contents(full_disk) == {"a": "one"}


def test_digest_of_a_file(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a").startswith("ba7816bf8f01cfea")


def test_a_folder_is_named_so_that_it_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    names = ("base", "./base", str(tmp_path / "base"))
    assert {located(name) for name in names} == {str(tmp_path / "base")}
    assert (located("somebody/model"), located(None)) == ("somebody/model", None)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"{", "a.json:1: this is not JSON"),
        (b"\xff", r"not UTF-8 text \(byte 0\)"),
        (b"1" * 5000, "too large to be meant"),
        (b"[" * 100_000, "too large to be meant"),
    ],
)
def test_a_file_that_is_no_json_is_told(tmp_path: Path, raw: bytes, told: str) -> None:
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(InputError, match=told):
        read_json(tmp_path / "a.json")


def test_a_pipe_is_not_waited_for_and_what_is_not_there_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, told in (
        ("pipe", "no regular file"), (".", "no regular file"), ("none", "No such file"),
        ("loop", "symbolic links"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=told):
            read_json(tmp_path / name)


def test_those_who_publish_the_same_folder_at_once_do_so_in_turns(tmp_path: Path) -> None:
    """As the ranks of a script that all save an adapter."""
    target = tmp_path / "adapter"

    def publish(number: int) -> None:
        with publish_folder(target) as temporary:
            assert not list(temporary.iterdir())
            for name in ("one", "other"):
                (temporary / name).write_text(str(number))
                time.sleep(0.002)

    with ThreadPoolExecutor(6) as pool:  # each with a handle of its own, as processes have
        list(pool.map(publish, range(24)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["adapter"]
    assert (target / "one").read_text() == (target / "other").read_text()
