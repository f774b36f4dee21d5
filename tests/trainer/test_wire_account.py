"""The file of a run's calls: its bytes are the ledger's, and it follows interruptions."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from modicum.core.errors import ModicumError
from modicum.core.ranks.ranks import Ranks
from modicum.recipe import Recipe
from modicum.report import summary
from modicum.trainer import continued, train


def recipe_of(data: Path, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Eight updates of two micro-batches a rank, at widths that ranks divide."""
    values: dict[str, Any] = {
        "data": {"path": str(data), "column": "answer", "prompt_column": "question",
                 "sequence_length": 24, "validation_fraction": 0.1},
        "model": {"layers": 2, "width": 48, "heads": 4, "kv_heads": 2, "vocabulary_size": 300},
        "training": {"steps": 8, "batch_size": 12, "micro_batch_size": 3, "compile": "none"},
        "evaluation": {"every": 4, "rows": 3},
        "checkpoint": {"every": 3},
        "samples": {"count": 0},
    }  # fmt: skip
    return {**values, **sections}


def trains(ranks: Ranks, values: dict[str, Any], folder: Path, stop: int | None = None) -> str:
    def listener(told: dict[str, Any]) -> None:
        if stop and told["event"] == "step" and told["step"] == stop and ranks.first:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train(
            continued(Recipe(**values), folder, ranks=ranks), folder, ranks=ranks, listener=listener
        )
    except ModicumError as error:
        return f"{error.exit_code}"
    return "done"


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {"parallel": {"strategy": "ddp", "bucket": "40KB"}},
    "fsdp": {"parallel": {"strategy": "fsdp"}},
    "zero": {"parallel": {"strategy": "zero", "bucket": "40KB"}},
    "dear": {"parallel": {"strategy": "ddp"}, "comm": {"method": "dear", "layers": 1}},
    "powersgd": {"parallel": {"strategy": "ddp", "bucket": "40KB"}, "comm": {"method": "powersgd"}},
    "acp_sgd": {"parallel": {"strategy": "zero", "bucket": "40KB"}, "comm": {"method": "acp_sgd"}},
}


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_is_what_the_ledger_says_to_the_byte(
    pool: Pool, questions: Path, tmp_path: Path, way: str
) -> None:
    folder = tmp_path / "run"
    assert pool.run(trains, recipe_of(questions, WAYS[way]), folder, ranks=2) == ["done"] * 2
    found = summary(folder)["wire"]
    assert found["updates"] == 8
    assert found["kept"] == 8
    planned = rows(folder, "plan")[-1]["prediction"]
    said = {row["collective"]: row["predicted_bytes"] for row in found["rows"]}
    assert sum(said.values()) == planned["wire_bytes"] > 0
    for row in found["rows"]:
        assert row["bytes"] == row["predicted_bytes"], row
        assert row["calls"] == row["predicted_calls"], row
    assert 0 < found["agreement"]["bytes"] < 0.01 * planned["wire_bytes"]
    labels = {call["label"] for row in rows(folder, "wire") for call in row["calls"]}
    assert any("blocks.1" in label or "layers.1" in label for label in labels), labels
    for row in rows(folder, "wire"):
        for call in row["calls"]:
            assert 0 <= call["asked"] <= call["begun"] <= call["ended"]
            assert 0 <= call["waited"] <= row["seconds"]


@pytest.mark.ranks
def test_a_run_that_resumes_has_no_update_twice(
    pool: Pool, questions: Path, tmp_path: Path
) -> None:
    folder, values = tmp_path / "run", recipe_of(questions, WAYS["ddp"])
    assert pool.run(trains, values, folder, 5, ranks=2) == ["4", "4"]
    assert [row["step"] for row in rows(folder, "wire")] == [1, 2, 3, 4, 5]
    assert pool.run(trains, values, folder, ranks=2) == ["done"] * 2
    found = rows(folder, "wire")
    assert [row["step"] for row in found] == list(range(1, 9))
    assert [row["so_far"]["updates"] for row in found] == list(range(1, 9))


def test_one_process_alone_has_no_such_file(questions: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = recipe_of(questions, {}) | {"training": {"steps": 2, "batch_size": 4}}
    assert trains(Ranks(), values, folder) == "done"
    assert not (folder / "wire.jsonl").exists()
    assert summary(folder)["wire"] is None
