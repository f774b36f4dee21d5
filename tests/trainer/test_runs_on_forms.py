"""Runs of adapters on bases that hold no dense weight: in tiles on several ranks, compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, trains

from modicum import adapters
from modicum.checkpoint import CheckpointStore
from modicum.core.ranks.ranks import Ranks
from modicum.models import huggingface

pytestmark = pytest.mark.expensive
ZERO = {"strategy": "zero"}
TILES = {"method": "tiles", "bits": 4, "tile_rows": 4, "tile_columns": 2}
ON_TILES = {"method": "qa_hira", "tile_rows": 4, "tile_columns": 2}


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    assert trains(Ranks(), recipe_of(questions, training={"steps": 4}), folder) == "done"
    return folder


def on_tiles(base: Path, data: Path, **sections: Any) -> dict[str, Any]:
    made = recipe_of(data, **sections)
    return made | {"model": {"path": str(base)}, "linear": TILES, "adapter": ON_TILES}


@pytest.fixture(scope="module")
def alone(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiles") / "run"
    assert trains(Ranks(), on_tiles(base, questions), folder) == "done"
    return folder


def test_in_tiles_it_learns_and_loads_on_tiles(base: Path, questions: Path, alone: Path) -> None:
    losses = column(alone, "loss")
    assert losses[-1] < losses[0]
    state = CheckpointStore(alone / "checkpoints").newest(lambda message: None).state["model"]
    assert {name.rpartition(".")[2] for name in state} == {"M"}
    assert all(tensor.any() for tensor in state.values())
    model = huggingface.load(base / "model")
    loaded = adapters.load(model, alone / "adapter")
    assert {layer.tile for _, layer in loaded.layers()} == {(4, 2)}


@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP, ZERO], ids=["ddp", "fsdp", "zero"])
def test_killed_on_two_ranks_it_resumes_to_the_bit(
    pool: Pool, base: Path, questions: Path, alone: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = on_tiles(base, questions, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "calm", ranks=2) == ["done"] * 2
    for key, off in (("loss", 1e-3), ("gradient_norm", 1e-2)):
        mine, theirs = column(tmp_path / "calm", key), column(alone, key)
        assert mine == pytest.approx(theirs, rel=off)
    stopped = pool.run(trains, made, tmp_path / "run", (1, 6), ranks=2)
    assert all(said.startswith("4: ") for said in stopped)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    assert outcome(tmp_path / "run") == outcome(tmp_path / "calm")


@pytest.fixture(scope="module")
def compressed(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are factors, as a run leaves it."""
    folder = tmp_path_factory.mktemp("compressed") / "run"
    made = recipe_of(questions, training={"steps": 2})
    made |= {"model": {"path": str(base)}, "compress": {"method": "fwsvd", "share": 0.7}}
    assert trains(Ranks(), made, folder) == "done"
    return folder / "compressed"


@pytest.mark.parametrize(
    "adapter",
    [{"method": "svfit", "rank": 3}, {"method": "loldu"}, {"method": "lora_xs", "rank": 3}],
    ids=lambda adapter: adapter["method"],
)
def test_on_a_compressed_model_it_learns_resumes_and_loads(
    compressed: Path, questions: Path, tmp_path: Path, adapter: dict[str, Any]
) -> None:
    made = recipe_of(questions, training={"schedule": "constant"})
    made |= {"model": {"path": str(compressed)}, "adapter": adapter}
    assert trains(Ranks(), made, tmp_path / "calm") == "done"
    losses = column(tmp_path / "calm", "loss", "evaluations")
    assert losses[-1] < losses[0]
    assert trains(Ranks(), made, tmp_path / "run", (0, 6)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(tmp_path / "calm")
    model, ids = huggingface.load(compressed), torch.arange(24).view(2, 12)
    before = model(ids)
    adapters.load(model, tmp_path / "run" / "adapter")
    assert not torch.equal(model(ids), before)
