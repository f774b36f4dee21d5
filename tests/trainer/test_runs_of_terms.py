"""Runs of an adapter whose sizes the weights say and whose start is taken out of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, rows, trains

from modicum import adapters
from modicum.adapters.preparation import Preparation
from modicum.core.ranks.ranks import Ranks
from modicum.models import huggingface
from modicum.trainer.folder import PREPARED

TOTAL = 2500
SHARED = {"method": "soka", "rank": None, "total": TOTAL}
pytestmark = pytest.mark.expensive


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    assert trains(Ranks(), recipe_of(questions, training={"steps": 4}), folder) == "done"
    return folder


def values(base: Path, data: Path, **sections: Any) -> dict[str, Any]:
    made = recipe_of(data, **sections)
    return made | {"model": {"path": str(base)}, "adapter": SHARED}


@pytest.fixture(scope="module")
def alone(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terms") / "run"
    assert trains(Ranks(), values(base, questions), folder) == "done"
    return folder


def test_the_plan_counts_the_bound_and_then_what_was_handed_out(alone: Path, base: Path) -> None:
    plans = [json.loads(row) for row in (alone / "plan.jsonl").read_text().splitlines()]
    trained = [row["parameters"]["trainable"] for row in plans]
    assert trained[-1] <= TOTAL < trained[0]
    found = Preparation.load(alone / PREPARED).values
    assert len({own["rank"] for own in found.values()}) > 1
    losses = column(alone, "loss")
    assert losses[-1] < losses[0]
    model, ids = huggingface.load(base / "model"), torch.arange(24).view(2, 12)
    before = model(ids)
    loaded = adapters.load(model, alone / "adapter")
    assert {name: len(layer.get_parameter("outer")) for name, layer in loaded.layers()} == {
        name: own["rank"] for name, own in found.items()
    }
    assert sum(parameter.numel() for parameter in loaded.parameters()) == trained[-1]
    assert not torch.equal(model(ids), before)


@pytest.mark.parametrize(("linear", "stopped"), [(None, 2), ("nf4", 9)])
def test_killed_it_resumes_to_the_bit(
    base: Path, questions: Path, alone: Path, tmp_path: Path, linear: str | None, stopped: int
) -> None:
    made = values(base, questions)
    if linear is not None:
        made["linear"] = {"method": linear}
        assert trains(Ranks(), made, tmp_path / "calm") == "done"
    assert trains(Ranks(), made, tmp_path / "run", (0, stopped)).startswith("4: stopped")
    assert len(rows(tmp_path / "run")) == stopped
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(tmp_path / "calm" if linear else alone)
    found, known = (Preparation.load(run / PREPARED) for run in (tmp_path / "run", alone))
    assert found.values == known.values  # by the file's weights, whatever holds them


@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_on_two_ranks_it_is_the_same(
    pool: Pool, base: Path, questions: Path, alone: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = values(base, questions, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    assert Preparation.load(tmp_path / "run" / PREPARED).values == (
        Preparation.load(alone / PREPARED).values
    )
    for key, off in (("loss", 1e-3), ("gradient_norm", 1e-2)):
        mine, theirs = column(tmp_path / "run", key), column(alone, key)
        assert mine == pytest.approx(theirs, rel=off)
