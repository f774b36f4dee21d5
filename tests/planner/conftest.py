from __future__ import annotations

import importlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modicum.core.machine.record import MachineRecord
from modicum.data.tokenizer import Tokenizer
from modicum.models.config import ModelConfig
from modicum.models.traced_cache import TraceFailed, TraceRequest, answer
from modicum.planner.choose import with_headroom
from modicum.planner.plan import Plan
from modicum.recipe import Recipe

# What is known of the machine that these tests plan for.
RECORD = MachineRecord(loaded_bytes=30_000_000, kept=(0.02, 0.1), efficiency=0.5)


@pytest.fixture(autouse=True)
def _steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds the same at each plan, where a real one grows a little, and a record."""
    monkeypatch.setattr("modicum.planner.choose.resident_bytes", lambda: 250_000_000)
    # Models of these tests are far smaller than what a budget is kept with to spare.
    monkeypatch.setattr("modicum.planner.choose.LEAST_HEADROOM", 0)
    for name in ("planning", "starting.method"):
        module = importlib.import_module(f"modicum.planner.{name}")
        monkeypatch.setattr(module, "machine_record", lambda device: RECORD)


@pytest.fixture
def traced_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be traced by another process, which takes seconds to start, is traced here."""
    found: list[str] = []

    def here(request: TraceRequest, wanted: list[Any]) -> Any:
        found.append(request.build)
        given = {"build": request.build, "arguments": request.arguments, "wanted": wanted}
        made = json.loads(json.dumps(answer(json.loads(json.dumps(given)))))
        if "failed" in made:
            raise TraceFailed(made["failed"])
        return made["passes"]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("modicum.models.traced_cache._traced_apart", here)
    return found


@pytest.fixture(scope="session")
def needs() -> Callable[[Plan], int]:
    """The least budget that keeps a plan."""

    def bytes_of(made: Plan) -> int:
        base, kept = made.process_base, made.record.expected - 1
        return with_headroom(made.prediction.process_bytes(base, kept), base)

    return bytes_of


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train(iter(["to be or not to be"] * 9), 260).save(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A JSONL file of forty short documents."""
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "to be or not to be"}\n' * 40)
    return file


@pytest.fixture
def new(text: Path) -> Callable[..., Recipe]:
    """Recipes of small new models, by sections' fields."""

    def make(**sections: dict[str, Any]) -> Recipe:
        data = {"path": str(text), "sequence_length": 128, **sections.pop("data", {})}
        model = {"layers": 4, "width": 64, "vocabulary_size": 1024, **sections.pop("model", {})}
        return Recipe(data=data, model=model, **sections)

    return make


@pytest.fixture
def hollow(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., Path]:
    """Model folders whose weights have a header and no bytes on the disk."""

    def make(config: ModelConfig, dtype: str = "BF16") -> Path:
        folder = tmp_path / "hollow"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config.to_hf()))
        for file in tokenizer_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        header, end = {}, 0
        for name, shape in config.parameter_shapes().items():
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        packed = json.dumps(header).encode()
        with open(folder / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(packed)) + packed)
            file.truncate(8 + len(packed) + end)
        return folder

    return make
