from __future__ import annotations

import errno
import os
import zlib

import pytest
import torch
from safetensors.torch import load_file

from modicum.checkpoint import tensor_file
from modicum.checkpoint.staging import Staging
from modicum.checkpoint.tensor_file import (
    PAGE,
    FileLayout,
    chunks,
    file_checksum,
    read_into,
    streamed,
    write_file,
)
from modicum.checkpoint.tensor_slices import TensorSlice

TENSORS = {
    "byte": torch.arange(7, dtype=torch.uint8),
    "long": torch.arange(5),
    "half": torch.ones(3, 3).bfloat16(),
    "flag": torch.tensor(True),
    "large": torch.arange(3000.0).view(30, 100).T,
}


def pieces():
    return dict(TensorSlice.of(name, tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("chunk", [PAGE, 3 * PAGE, 1 << 20])
@pytest.mark.parametrize("direct", [False, True])
def test_staged_and_streamed_content_is_one_safetensors_file(tmp_path, monkeypatch, chunk, direct):
    monkeypatch.setattr(tensor_file, "CHUNK", chunk)
    layout = FileLayout.of(list(pieces()))
    staging = Staging(layout)
    staging.take(pieces())
    path = tmp_path / "a"
    checksum = write_file(path, chunks(staging.content), direct=direct)
    assert path.stat().st_size == layout.size
    assert checksum == file_checksum(path) == f"{zlib.crc32(path.read_bytes()):08x}"
    assert write_file(tmp_path / "b", streamed(layout, pieces())) == checksum
    back = load_file(path)
    assert back.keys() == TENSORS.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in TENSORS.items())
    assert len(layout.header) % PAGE == 0
    assert all(start % piece.item_bytes == 0 for piece, start in layout.places.items())


@pytest.mark.parametrize("short", [100, PAGE])
def test_a_file_system_that_writes_little_at_a_time_or_not_directly(tmp_path, monkeypatch, short):
    monkeypatch.setattr(tensor_file, "CHUNK", PAGE)
    layout = FileLayout.of(list(pieces()))
    staging = Staging(layout)
    staging.take(pieces())
    write, refused = os.write, []

    def stubborn(handle, content):
        if not refused and tensor_file._DIRECT:
            refused.append(True)
            raise OSError(errno.EINVAL, "no direct writes here")
        return write(handle, content[:short])

    monkeypatch.setattr(tensor_file.os, "write", stubborn)
    checksum = write_file(tmp_path / "a", chunks(staging.content), direct=True)
    monkeypatch.undo()
    assert checksum == file_checksum(tmp_path / "a")


def test_other_errors_are_not_taken_for_a_lack_of_direct_writing(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(tensor_file.os, "write", broken)
    with pytest.raises(OSError, match="broken"):
        write_file(tmp_path / "a", [memoryview(b"x")], direct=True)


def test_two_tensors_of_one_name_are_refused():
    one = TensorSlice("w@2", "U8", (3,), (0,), (3,))
    other = TensorSlice("w", "U8", (5,), (2,), (3,))
    with pytest.raises(ValueError, match="two tensors are named 'w@2'"):
        FileLayout.of([one, other])


def test_a_part_is_put_together_from_pieces(tmp_path):
    whole = torch.arange(40.0).view(8, 5)
    cut = [(0, 3), (3, 4), (4, 8)]
    tensors = {
        TensorSlice("w", "F32", (8, 5), (a, 0), (b - a, 5)): whole[a:b] for a, b in cut
    }  # fmt: skip
    layout = FileLayout.of(list(tensors))
    write_file(tmp_path / "a", streamed(layout, tensors))
    target = torch.empty(4, 2)
    assert read_into(target, ((2, 1), (4, 2)), tmp_path / "a", tensors) == 8
    assert torch.equal(target, whole[2:6, 1:3])
