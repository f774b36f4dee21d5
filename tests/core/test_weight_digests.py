"""A base model's files: every byte counts, and what is remembered is not believed too long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modicum.core import weight_digests as module
from modicum.core.errors import InputError
from modicum.core.weight_digests import changed_weights, read_digests, weight_digests

SIZE = 3 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.safetensors").write_bytes(bytes(SIZE))
    return folder


def change(file: Path, place: int) -> None:
    """Change a byte in place; size and times stay what they were."""
    before = file.stat()
    with file.open("r+b") as handle:
        handle.seek(place)
        handle.write(b"\1")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("place", [0, SIZE // 2 + 1000, SIZE - 1])
def test_any_byte_counts(model: Path, place: int) -> None:
    before = weight_digests(model)
    assert changed_weights(model, before) == []
    change(model / "b.safetensors", place)
    assert changed_weights(model, before) == ["b.safetensors"]
    (model / "a.safetensors").rename(model / "c.safetensors")
    assert changed_weights(model, before) == [f"{name}.safetensors" for name in "abc"]
    assert weight_digests(None) == {}


def test_digests_of_early_versions_are_compared_as_they_were_taken(model: Path) -> None:
    before = {file.name: module._sampled(file) for file in model.iterdir()}
    change(model / "b.safetensors", SIZE // 2 + 1000)  # between two samples
    assert changed_weights(model, before) == []
    change(model / "a.safetensors", 100)
    assert changed_weights(model, before) == ["a.safetensors"]


def test_a_large_files_digest_is_remembered_until_it_is_touched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_REMEMBERED", SIZE)
    before = weight_digests(model)
    assert not (tmp_path / "cache").exists()  # written a moment ago
    monkeypatch.setattr(module, "_SETTLED", -1.0)
    assert weight_digests(model) == before
    read: list[Path] = []
    digest = module.file_digest
    monkeypatch.setattr(module, "file_digest", lambda path: (read.append(path), digest(path))[1])
    assert weight_digests(model) == before
    assert read == []
    change(model / "b.safetensors", 5)
    assert changed_weights(model, before) == ["b.safetensors"]
    assert read == [model / "b.safetensors"]


def test_a_file_of_digests_that_holds_something_else_is_damaged(model: Path) -> None:
    file = model / "digests.json"
    for text in ("[]", "{", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(InputError, match=r"digests\.json: is damaged"):
            read_digests(file)
    file.write_text('{"a.safetensors": 7}')
    assert changed_weights(model, read_digests(file)) == ["a.safetensors", "b.safetensors"]
