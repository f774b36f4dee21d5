"""Runs of adapters whose tensors are derived from base weights: made again wherever they resume."""

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
from modicum.checkpoint import CheckpointStore
from modicum.core.ranks.ranks import Ranks
from modicum.models import huggingface
from modicum.trainer.folder import PREPARED

# Each layer's own rank, and a base in four bits, so that weights come from the model's files.
BY_ENERGY = {"method": "svfit", "rank": None, "energy": 0.7}
pytestmark = pytest.mark.expensive


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    assert trains(Ranks(), recipe_of(questions, training={"steps": 4}), folder) == "done"
    return folder


def values(base: Path, data: Path, **sections: Any) -> dict[str, Any]:
    made = recipe_of(data, **sections)
    form = {"linear": {"method": "nf4"}}
    return made | {"model": {"path": str(base)}, "adapter": BY_ENERGY} | form


@pytest.fixture(scope="module")
def alone(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("directions") / "run"
    assert trains(Ranks(), values(base, questions), folder) == "done"
    return folder


def test_ranks_are_counted_and_checkpoints_hold_vectors_alone(alone: Path) -> None:
    ranks = {name: own["rank"] for name, own in Preparation.load(alone / PREPARED).values.items()}
    assert len(set(ranks.values())) > 1
    last = json.loads((alone / "plan.jsonl").read_text().splitlines()[-1])
    assert last["parameters"]["trainable"] == sum(ranks.values())
    state = CheckpointStore(alone / "checkpoints").newest(lambda message: None).state["model"]
    at = "layers_by_adapter.default"
    expected = {f"{name}.{at}.{key}" for name in ranks for key in ("shift", "fingerprint")}
    assert set(state) == expected
    assert all(state[f"{name}.{at}.shift"].shape == (rank,) for name, rank in ranks.items())
    assert all(state[f"{name}.{at}.shift"].any() for name in ranks)
    losses = column(alone, "loss")
    assert losses[-1] < losses[0]


def test_the_exported_adapter_is_a_lora_of_each_layers_rank(alone: Path, base: Path) -> None:
    ranks = {name: own["rank"] for name, own in Preparation.load(alone / PREPARED).values.items()}
    model = huggingface.load(base / "model")
    ids = torch.arange(24).view(2, 12)
    before = model(ids)
    loaded = adapters.load(model, alone / "adapter")
    found = {name: layer.A.shape[0] for name, layer in loaded.layers()}
    assert found == ranks
    assert not torch.equal(model(ids), before)


@pytest.mark.parametrize("stopped", [2, 9])
def test_killed_it_resumes_to_the_bit(
    base: Path, questions: Path, alone: Path, tmp_path: Path, stopped: int
) -> None:
    made = values(base, questions)
    assert trains(Ranks(), made, tmp_path / "run", (0, stopped)).startswith("4: stopped")
    assert len(rows(tmp_path / "run")) == stopped
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)


@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP])
def test_on_two_ranks_it_is_the_same(
    pool: Pool, base: Path, questions: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = values(base, questions, parallel=parallel)
    del made["linear"]
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    plain = {key: value for key, value in made.items() if key != "parallel"}
    assert trains(Ranks(), plain, tmp_path / "alone") == "done"
    for key, off in (("loss", 1e-3), ("gradient_norm", 1e-2)):
        mine, theirs = column(tmp_path / "run", key), column(tmp_path / "alone", key)
        assert mine == pytest.approx(theirs, rel=off)
