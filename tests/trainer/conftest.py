"""A tiny data set, a tiny trained model, and runs in processes of their own that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import modicum

WORDS = ["the", "a", "small", "large", "red", "blue", "cat", "dog", "tree", "house"]
WORDS += ["sees", "likes", "finds", "near", "under", "over"]


def sentence(number: int) -> str:
    """A few words, each chosen by the number: text with something to learn."""
    return " ".join(
        WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(9)
    )


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 short documents as JSONL."""
    file = tmp_path_factory.mktemp("dataset") / "data.jsonl"
    rows = (json.dumps({"text": f"{sentence(n)}. {sentence(n + 3)}."}) for n in range(400))
    file.write_text("\n".join(rows) + "\n")
    return file


def full(dataset: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe of a full training in plain values: 2 layers of width 32, 20 steps of 8 x 32."""
    values: dict[str, Any] = {
        "data": {"path": str(dataset), "sequence_length": 32, "validation_fraction": 0.1},
        "model": {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "vocabulary_size": 300},
        "training": {"steps": 20, "batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-2},
        "evaluation": {"every": 10, "rows": 8},
        "checkpoint": {"every": 5},
        "samples": {"prompts": ["the cat"], "tokens": 4},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return values


def lora(base: Path, dataset: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The same with LoRA and dropout on a trained base."""
    sections = {"adapter": {"method": "lora", "rank": 4, "dropout": 0.2}} | sections
    return full(dataset, **sections) | {"model": {"path": str(base)}}


@pytest.fixture(autouse=True, scope="session")
def quick() -> Iterator[None]:
    """Runs in this process neither measure the machine nor tidy its memory, each a while."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("modicum.core.machine._matrix_rate", lambda *_: 1e10)
        patched.setattr("modicum.trainer.setup.release", lambda: None)
        patched.setattr("modicum.trainer.assembly.release", lambda: None)
        patched.setattr("modicum.trainer.rehearsal.release", lambda: None)
        yield


def run(values: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    """Plan and train in this process."""
    return modicum.train(modicum.plan(modicum.Recipe(**values)), folder, **options)


@pytest.fixture(scope="session")
def finished(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an uninterrupted full training; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(full(dataset), folder)
    return folder


@pytest.fixture(scope="session")
def finished_lora(finished: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an uninterrupted adaptation of that model."""
    folder = tmp_path_factory.mktemp("finished_lora") / "run"
    run(lora(finished, dataset), folder)
    return folder


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a .jsonl file, each of which must be whole."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """What of the metrics is a function of the recipe."""
    return [(row["step"], row["loss"], row["gradient_norm"]) for row in rows(folder)]


def outcome(folder: Path) -> dict[str, Any]:
    """All of a run folder that is a function of the recipe, to the bit."""
    weights = [*folder.glob("model/*.safetensors"), *folder.glob("adapter/*.safetensors")]
    return {
        "losses": losses(folder),
        "evaluations": [(row["step"], row["loss"]) for row in rows(folder, "evaluations.jsonl")],
        "samples": rows(folder, "samples.jsonl"),
        "weights": {path.name: path.read_bytes() for path in weights},
        "tokenizer": (folder / "tokenizer" / "tokenizer.json").read_text(),
        "steps": json.loads((folder / "run.json").read_text())["steps"],
    }


CHILD = """
import os, signal, sys, json, time
values, folder, event, number, signal_number = json.loads(sys.argv[1])
import torch
torch.set_num_threads(1)
import modicum
from modicum.core.errors import ModicumError
seen = 0

def strike():
    global seen
    seen += 1
    if seen == number:
        os.kill(os.getpid(), signal_number)

def listener(told):
    name = told["event"] if told["event"] != "phase" else told["name"]
    if name == event:
        strike()

if event.startswith("sync "):  # while a certain file is being written
    sync = os.fsync

    def synced(handle):
        if event.removeprefix("sync ") in os.readlink(f"/proc/self/fd/{handle}"):
            strike()
        sync(handle)

    os.fsync = synced
if event == "backward":  # between the micro-batches of an update
    backward = torch.Tensor.backward
    torch.Tensor.backward = lambda tensor: (backward(tensor), strike())[0]
try:
    modicum.train(modicum.plan(modicum.Recipe(**values)), folder, listener=listener)
except ModicumError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@dataclass(frozen=True)
class Ended:
    """How a process ended: its code (negative: the signal that killed it) and what it said."""

    code: int
    said: str


@pytest.fixture(scope="session")
def child() -> Callable[..., Ended]:
    """Run a recipe in a process that gets a signal at the number-th time that something happens."""

    def start(
        values: dict[str, Any],
        folder: Path,
        event: str = "never",
        number: int = 1,
        signal_number: int = signal.SIGKILL,
    ) -> Ended:
        told = json.dumps([values, str(folder), event, number, int(signal_number)])
        done = subprocess.run(
            [sys.executable, "-c", CHILD, told],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return Ended(done.returncode, done.stderr)

    return start


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL with prompts of very different lengths: ranks train unequal numbers of tokens."""
    file = tmp_path_factory.mktemp("questions") / "data.jsonl"
    rows = (
        {"question": "why " * (n % 9) * (n % 4) + "? ", "answer": f"as {n % 5} is a tree"}
        for n in range(200)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
