"""Run folders made up for tests, in the formats that a run writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPE = """\
model:
  path: runs/demo-train/model
data:
  path: unseen/
  sequence_length: 256
adapter:
  method: lora
  rank: 8
training:
  steps: 240
  batch_size: 16
  micro_batch_size: auto
  learning_rate: 0.002
budget:
  memory: 1.2GB
"""
RUN: dict[str, Any] = {
    "status": "finished",
    "modicum": "0.1.0",
    "versions": {"python": "3.11.2", "torch": "2.13.0", "safetensors": "0.7.0"},
    "machine": {"processor": "x86_64", "cores": 2, "memory_bytes": 8_350_000_000,
                "accelerator": None},
    "started": "2026-03-01T10:20:30.123456+00:00",
    "ended": "2026-03-01T10:23:01+00:00",
    "seconds": 151.4,
    "time": {
        "rows": {"start-up": 1.4, "start-up/data": 8.6, "compute/forward": 40.0,
                 "compute/backward": 80.0, "compute/update": 11.4, "data": 2.0, "wire": 4.0,
                 "checkpoint": 3.0, "unexplained": 1.0},
        "ranks": {"wire": {"median": 3.5, "most": 4.0, "rank": 1}},
        "checkpoint_writing": 6.5,
    },
    "steps": 240,
    "tokens": 983_040,
    "tokens_per_second": 7431.5,
    "peak_bytes": {"predicted": 512_000_000, "measured": 498_765_432, "process": 1_043_210_000,
                   "process_predicted": 1_090_000_000, "budget": 1_200_000_000},
    "measured_by_kind": {"weight": 118_000_000, "gradient": 2_400_000, "optimizer": 4_800_000},
    "parameters": {"total": 30_120_448, "trainable": 593_920},
    "final": {"loss": 2.1234, "validation_loss": 2.3456, "initial_validation_loss": 3.9871},
    "interruptions": 1,
    "outputs": {"adapter": "adapter/"},
    "error": None,
}  # fmt: skip


def plan(revision: int = 1, micro_batch_size: int = 8) -> dict[str, Any]:
    """One row of plan.jsonl."""
    entries = [
        ("weight", "always", 120_481_792, "30,120,448 parameters in float32"),
        ("optimizer", "always", 4_751_360, "AdamW: two moments of what is trained"),
        ("gradient", "backward, step", 2_375_680, "of the adapter"),
        ("activation", "forward, backward", 44_000_000 * micro_batch_size, "saved for backward"),
        ("workspace", "backward", 32_000_000, "the largest layer's"),
        ("activation", "evaluation", 90_000_000, "logits"),
        ("disk", "always", 9_000_000, "checkpoints"),
    ]
    return {
        "revision": revision,
        "when": f"2026-03-01T10:20:3{revision}+00:00",
        "why": "first plan" if revision == 1 else "the first step used more than predicted",
        "choices": [
            {"field": "training.micro_batch_size", "value": micro_batch_size,
             "why": "largest that keeps the budget"},
            {"field": "memory.recompute", "value": "none", "why": "everything fits without"},
        ],
        "prediction": {
            "peak_bytes": 512_000_000,
            "process_bytes": 1_090_000_000,
            "budget_bytes": 1_200_000_000,
            "table": [dict(zip(("kind", "phase", "bytes", "what"), entry, strict=True))
                      for entry in entries],
            "by_phase": {"forward": 125_233_152 + 44_000_000 * micro_batch_size,
                         "backward": 159_608_832 + 44_000_000 * micro_batch_size,
                         "step": 127_608_832, "evaluation": 215_233_152},
            "tokens_per_second": 7000.0,
            "seconds": 140.4,
        },
        "parameters": {"total": 30_120_448, "trainable": 593_920},
        "tokens_per_update": 4096,
    }  # fmt: skip


def metrics(steps: int) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl: a loss that falls, with a ripple that is the same every time."""
    return [
        {
            "step": step,
            "loss": 2.0 + 2.0 * math.exp(-step / 60) + 0.12 * math.sin(step * 12.9898) ** 3,
            "learning_rate": 0.002 * min(1, step / 20) * (1 - 0.9 * step / (steps + 1)),
            "gradient_norm": 0.6 + 0.3 * math.cos(step * 78.233) ** 2,
            "tokens": 4096,
            "seconds": 0.55 + 0.02 * math.sin(step),
            "tokens_per_second": 4096 / (0.55 + 0.02 * math.sin(step)),
            "bytes": 1_000_000_000 + min(step, 40) * 1_000_000,
        }
        for step in range(1, steps + 1)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """A file with one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_folder(folder: Path, steps: int = 240, plans: int = 1, **changes: Any) -> Path:
    """A whole run folder; `changes` go into run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    write_rows(folder / "plan.jsonl", [plan(n + 1, 8 - 2 * n) for n in range(plans)])
    write_rows(folder / "metrics.jsonl", metrics(steps))
    evaluations = [
        {"step": step, "loss": 2.3456 + 1.6415 * math.exp(-step / 60), "tokens": 20480,
         "seconds": 1.5}
        for step in range(0, steps + 1, 40)
    ]  # fmt: skip
    write_rows(folder / "evaluations.jsonl", evaluations)
    prompt = "def parse(text):\n    "
    last = """\
'''Parse text & return a list.'''
    if not text or "<b>" in text:
        return []
    return [line.strip() for line in text.split("\\n")]"""
    answers = {0: "cd b_ret)) = <x> import\nimport\n\n  : self", 120: "if text:", 240: last}
    samples = [
        {"step": step, "prompt": prompt, "text": prompt + text} for step, text in answers.items()
    ]
    write_rows(folder / "samples.jsonl", samples)
    (folder / "run.json").write_text(json.dumps(RUN | changes))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a whole run folder; see `run_folder`."""
    return lambda name="demo", **options: run_folder(tmp_path / name, **options)


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that a test changes and puts back."""
    return run_folder(tmp_path_factory.mktemp("whole"), steps=4, plans=2)
