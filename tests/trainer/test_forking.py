"""A fork by another optimizer than its origin's, or one that keeps other things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.trainer.conftest import full, rows, run

from modicum.checkpoint import CheckpointStore
from modicum.trainer.forking import _changed

GALORE = {"method": "galore", "rank": 8, "betas": [0.9, 0.99], "state_bits": 32}


def counts(folder: Path) -> set[float]:
    """How many updates the optimizer's state in the newest checkpoint has seen."""
    found = CheckpointStore(folder / "checkpoints").newest()
    assert found is not None
    state = found.state["optimizer"]
    return {float(state[key]) for key in state if key.endswith("/step")}


@pytest.mark.parametrize(
    ("optimizer", "said", "seen"),
    [
        ({"method": "adamw8bit", "smallest": 64}, "'adamw' -> 'adamw8bit'", 3),
        ({"method": "muon"}, "'adamw' -> 'muon'", 3),
        ({"betas": [0.9, 0.99], "weight_decay": 0.1}, None, 23),
    ],
    ids=str,
)
def test_an_optimizer_that_keeps_other_things_begins_anew_and_says_so(
    dataset: Path,
    finished: Path,
    tmp_path: Path,
    optimizer: dict[str, Any],
    said: str | None,
    seen: int,
) -> None:
    values, told = full(dataset, training={"steps": 23}, optimizer=optimizer), []
    run(values, tmp_path / "fork", fork=finished, listener=told.append)
    warned = [
        event["message"]
        for event in told
        if event["event"] == "warning" and "optimizer" in event["message"]
    ]
    assert len(warned) == (said is not None)
    assert all(f"begins anew: optimizer.method: {said}" in message for message in warned)
    assert [row["step"] for row in rows(tmp_path / "fork")] == [21, 22, 23]
    assert counts(tmp_path / "fork") == {seen}


def test_a_fork_trains_without_gradients_and_one_of_that_with_them(
    dataset: Path, finished: Path, tmp_path: Path
) -> None:
    blind = full(
        dataset,
        training={"steps": 22, "clip_norm": None, "learning_rate": 1e-3},
        optimizer={"method": "distzo2", "perturbations": 2},
    )
    run(blind, tmp_path / "blind", fork=finished)
    found = CheckpointStore(tmp_path / "blind" / "checkpoints").newest()
    assert found is not None
    assert found.state["log"]["updates"].shape == (2, 4)
    run(full(dataset, training={"steps": 24}), tmp_path / "seeing", fork=tmp_path / "blind")
    assert counts(tmp_path / "seeing") == {2}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"rank": 4}, ["optimizer.rank: 8 -> 4"]),
        ({"state_bits": 8, "betas": [0.8, 0.9]}, ["optimizer.state_bits: 32 -> 8"]),
        ({"method": "frugal", "rank": 4}, ["optimizer.method: 'galore' -> 'frugal'"]),
        ({"betas": [0.8, 0.9], "of_a_later_version": 3}, []),
    ],
    ids=str,
)
def test_what_changes_what_is_kept(now: dict[str, Any], said: list[str]) -> None:
    assert _changed(GALORE, GALORE | now) == said
    assert _changed({}, GALORE | now) == []  # the recipe could not be read
