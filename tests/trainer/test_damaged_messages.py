"""A run of ranks on several hosts, a message of which is damaged on its way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from pool import Pool
from tests.trainer.test_ranks import FSDP, outcome, recipe_of, trains

from modicum.core.ranks.ranks import Ranks


def on_hosts(ranks: Ranks, values: dict[str, Any], folder: Path, at: int | None) -> str:
    """A run of ranks that seem to be on hosts of their own; what rank 1 sends `at` is damaged."""
    ranks = replace(ranks, local_rank=0, local_size=1)
    right, sums = dist.all_to_all_single, 0

    def wrong(output: Any, sent: Any, *given: Any, **options: Any) -> Any:
        nonlocal sums
        sums += 1
        if sums == at:
            sent = sent.clone()
            sent[3] ^= 64  # of a number for rank 0
        return right(output, sent, *given, **options)

    with mock.patch.object(dist, "all_to_all_single", wrong if ranks.rank == 1 else right):
        return trains(ranks, values, folder)


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_run_ends_before_it_writes_what_was_damaged(
    pool: Pool, questions: Path, tmp_path: Path
) -> None:
    made = recipe_of(questions, training={"steps": 8}, parallel=FSDP)
    made |= {"checkpoint": {"every": "2"}}
    assert pool.run(trains, made, tmp_path / "alone", ranks=2) == ["done"] * 2
    for found in pool.run(on_hosts, made, tmp_path / "run", 20, ranks=2):
        assert found.startswith("4: rank 1 sent other bytes than came")
    assert pool.run(on_hosts, made, tmp_path / "run", None, ranks=2) == ["done"] * 2
    assert outcome(tmp_path / "run") == outcome(tmp_path / "alone")
