"""A run whose exchange the plan chose: the choice is kept when it resumes on another link."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pool import Pool

from modicum.core.errors import ModicumError
from modicum.core.machine.links import MeasuredLink
from modicum.core.ranks.ranks import Ranks
from modicum.planner import planning
from modicum.recipe import Recipe
from modicum.trainer import continued, train


def recipe_of(data: Path) -> dict[str, Any]:
    return {
        "data": {"path": str(data), "column": "answer", "prompt_column": "question",
                 "sequence_length": 24, "validation_fraction": 0.1},
        "model": {"layers": 2, "width": 48, "heads": 4, "vocabulary_size": 300},
        "training": {"steps": 6, "batch_size": 4, "compile": "none"},
        "parallel": {"strategy": "ddp"},
        "comm": {"method": "auto", "among": [{"method": "acp_sgd", "rank": 2}]},
        "evaluation": {"every": 100, "rows": 3},
        "checkpoint": {"every": 2},
        "samples": {"count": 0},
    }  # fmt: skip


def trains(
    ranks: Ranks,
    values: dict[str, Any],
    folder: Path,
    rate: float,
    stop: int | None = None,
    restart: bool = False,
) -> str:
    link = MeasuredLink(1e-5, rate, 0.0, 2, "now")

    def listener(told: dict[str, Any]) -> None:
        if stop and told["event"] == "step" and told["step"] == stop and ranks.first:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with patch.object(planning, "known_links", lambda: {"local": link}):
            made = continued(Recipe(**values), folder, ranks=ranks, restart=restart)
        train(made, folder, ranks=ranks, listener=listener, restart=restart)
    except ModicumError as error:
        return f"{error.exit_code}"
    return str((made.recipe.comm or {}).get("method"))


@pytest.mark.ranks
def test_the_choice_is_kept_when_the_run_resumes(
    pool: Pool, questions: Path, tmp_path: Path
) -> None:
    folder, values = tmp_path / "run", recipe_of(questions)
    assert pool.run(trains, values, folder, 1e4, 3, ranks=2) == ["4", "4"]
    assert pool.run(trains, values, folder, 1e12, ranks=2) == ["acp_sgd"] * 2
    rows = [json.loads(line) for line in (folder / "plan.jsonl").read_text().splitlines()]
    kept = [c for row in rows for c in row["choices"] if c["field"] == "comm"]
    assert any("a step is to take" in choice["why"] for choice in kept)
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 7))
    anew = pool.run(trains, values, folder, 1e12, None, True, ranks=2)
    assert anew[0] == anew[1] != "acp_sgd", "begun anew, it chooses by the link that there is now"
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
