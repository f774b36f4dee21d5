"""Conversations, and a tiny model with its adapter that were trained on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import modicum
from modicum.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from modicum.checkpoint.tensor_file import file_checksum
from modicum.core.ranks.ranks import Ranks
from modicum.data.sampler import Sampler
from modicum.verify.stretch import Stretch, run_stretch


def talks(count: int, first: int = 0) -> str:
    """Different conversations as JSONL."""
    rows = (
        [
            {"role": "user", "content": f"What is {n} + 1?"},
            {"role": "assistant", "content": f"It is {n + 1}."},
        ]
        for n in range(first, first + count)
    )
    return "".join(json.dumps({"messages": row}) + "\n" for row in rows)


def values(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe on `folder`'s conversations in plain values."""
    made: dict[str, Any] = {
        "model": {"layers": 1, "width": 16, "heads": 2, "vocabulary_size": 300},
        "data": {
            "path": str(folder / "train.jsonl"),
            "validation_path": str(folder / "held.jsonl"),
            "sequence_length": 64,
        },
        "training": {"steps": 8, "batch_size": 4, "learning_rate": 3e-2},
        "checkpoint": {"every": 4},
        "samples": {"count": 0},
    }
    for name, section in sections.items():
        made[name] = section if "path" in section else made.get(name, {}) | section
    return made


def run(values: dict[str, Any], folder: Path) -> Path:
    modicum.train(modicum.plan(modicum.Recipe(**values)), folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def quick() -> Iterator[None]:
    """Runs in this process neither measure the machine nor tidy its memory, each a while."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("modicum.core.machine._matrix_rate", lambda *_: 1e10)
        for module in ("setup", "assembly", "rehearsal"):
            patched.setattr(f"modicum.trainer.{module}.release", lambda: None)
        yield


@pytest.fixture
def here() -> Iterator[None]:
    """Stretches of a run are done in this process, not in one of their own."""
    with stretches_here():
        yield


@contextmanager
def stretches_here() -> Iterator[None]:
    """Stretches of a run are done in this process."""

    def start(stretch: Stretch) -> None:
        with as_new_process():
            run_stretch(stretch, Ranks())

    with pytest.MonkeyPatch.context() as patched:
        for module in ("resume", "reproduction"):
            patched.setattr(f"modicum.verify.{module}.launched", start)
        yield


@contextmanager
def as_new_process() -> Iterator[None]:
    """What a method patches in its process is as it was at the end."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Sampler, "indices", Sampler.indices)
        yield


def changed_checkpoint(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change tensors in a checkpoint, which is then as complete as any."""
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    file.unlink()  # it may be a link to another checkpoint's
    save_file(tensors, file)
    content = read_manifest(folder)
    entry = {"bytes": file.stat().st_size, "crc32": file_checksum(file)}
    content["files"][file.name] = entry
    names = json.dumps(content.pop("tensors"))
    content.pop("digest", None)
    (folder / MANIFEST).unlink()
    write_manifest(folder / MANIFEST, content, names)


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data that has nothing wrong."""
    folder = tmp_path_factory.mktemp("talks")
    (folder / "train.jsonl").write_text(talks(40))
    (folder / "held.jsonl").write_text(talks(8, first=100))
    return folder


@pytest.fixture(scope="session")
def base(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a new model; tests leave it as it is."""
    return run(values(clean), tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="session")
def adapted(clean: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of an adapter on that model; tests leave it as it is."""
    made = values(clean, model={"path": str(base)}, adapter={"method": "lora", "rank": 2})
    return run(made, tmp_path_factory.mktemp("adapted") / "run")
