"""A link at a hundredth of its rate is reported; a rank that is late, or a good link, is not."""

from __future__ import annotations

import json
import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pool import Pool

from modicum.core.machine.links import MeasuredLink
from modicum.core.ranks.pretended_link import Link, pretending
from modicum.core.ranks.ranks import Ranks
from modicum.planner import planning
from modicum.recipe import Recipe
from modicum.tasks.causal_lm import CausalLM
from modicum.trainer import continued, train

RATE = 4e6


def recipe_of(data: Path, **sections: Any) -> dict[str, Any]:
    return {
        "data": {"path": str(data), "column": "answer", "prompt_column": "question",
                 "sequence_length": 24, "validation_fraction": 0.1},
        "model": {"layers": 2, "width": 48, "heads": 4, "vocabulary_size": 300},
        "training": {"steps": 10, "batch_size": 4, "compile": "none"},
        "parallel": {"strategy": "ddp"},
        "evaluation": {"every": 100, "rows": 3},
        "checkpoint": {"every": 100},
        "samples": {"count": 0},
    } | sections  # fmt: skip


def trains(
    ranks: Ranks, values: dict[str, Any], folder: Path, rate: float, late: float = 0.0
) -> list[dict[str, Any]]:
    """What is reported of a run on a link that is pretended, and was measured at RATE."""
    link = MeasuredLink(1e-5, RATE, 0.0, 2, "now")
    told: list[dict[str, Any]] = []
    outputs = CausalLM.outputs

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(late if ranks.rank else 0.0)
        return outputs(*arguments, **options)

    with pretending(Link(rate=rate)):
        with patch.object(planning, "known_links", lambda: {"local": link}):
            made = continued(Recipe(**values), folder, ranks=ranks)
        with patch.object(CausalLM, "outputs", slow) if late else nullcontext():
            train(made, folder, ranks=ranks, listener=told.append)
    return [event for event in told if event["event"] == "anomaly"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("section", "part"), [({}, 100), ({"comm": {"method": "acp_sgd", "rank": 2}}, 400)]
)
def test_a_link_at_a_hundredth_of_its_rate_is_reported_with_what_auto_would_choose(
    pool: Pool, questions: Path, tmp_path: Path, section: dict[str, Any], part: int
) -> None:
    folder, values = tmp_path / "run", recipe_of(questions, **section)
    first, second = pool.run(trains, values, folder, RATE / part, ranks=2)
    assert second == []
    [event] = first
    assert event["step"] <= 10
    assert event["kind"] == "slow link"
    assert RATE / part / 2 < event["rate"] < 1.05 * RATE / part
    said = event["message"]
    start = r"the link carries [\d.]+ kB a second, (1|0\.\d+) % of the 4 MB that the plan counts"
    assert re.match(start, said)
    assert "comm: auto with all ways listed would choose" in said
    assert event["would_choose"]["method"] in ("acp_sgd", "powersgd", "dense_sums")
    [row] = [json.loads(line) for line in (folder / "anomalies.jsonl").read_text().splitlines()]
    assert row["sentence"] == said
    assert json.loads((folder / "run.json").read_text())["anomalies"][0]["sentence"] == said


@pytest.mark.ranks
def test_a_link_as_it_was_measured_and_a_late_rank_are_none(
    pool: Pool, questions: Path, tmp_path: Path
) -> None:
    values = recipe_of(questions)
    assert pool.run(trains, values, tmp_path / "good", RATE, ranks=2) == [[], []]
    assert pool.run(trains, values, tmp_path / "late", RATE, 0.5, ranks=2) == [[], []]
