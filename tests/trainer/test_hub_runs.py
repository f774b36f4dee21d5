"""Runs on models of the hub: planned without weights, downloaded once, kept at their commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cache import COMMIT, LATER, StandIn, stand_in
from pool import Pool
from tests.trainer.conftest import full
from tests.trainer.test_precision import in_dtype
from tests.trainer.test_ranks import trains

import modicum
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.recipe import Recipe
from modicum.trainer import continued, train
from modicum.trainer.hub_weights import with_weights

AT = f"hub:a/b,revision={COMMIT}"


@pytest.fixture
def hub(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(monkeypatch, finished / "model", tmp_path / "cache")


def values(dataset: Path, path: str = "hub:a/b", **training: Any) -> dict[str, Any]:
    made = full(dataset, training={"steps": 2, "schedule": "constant", **training})
    return made | {"model": {"path": path}}


def test_a_plan_is_that_of_the_folder(dataset, finished, hub):
    plan = modicum.plan(Recipe(**values(dataset)))
    assert not hub.downloaded("model.safetensors")
    assert plan.recipe.model.path == AT
    assert plan.choices[0]["why"] == "the commit of main now; the run stays with it"
    local = modicum.plan(Recipe(**values(dataset, str(finished / "model"))))
    assert plan.prediction.peak_bytes == local.prediction.peak_bytes
    assert plan.choices[1:] == local.choices


def test_a_run_downloads_its_weights_and_stays_at_its_commit(dataset, hub, tmp_path):
    folder = tmp_path / "run"
    train(continued(Recipe(**values(dataset)), folder), folder)
    assert f"path: {AT}" in (folder / "recipe.yaml").read_text()
    hub.commit = LATER
    plan = continued(Recipe(**values(dataset, steps=4)), folder)
    assert plan.recipe.model.path == AT
    train(plan, folder)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    with pytest.raises(InputError, match=r"model\.path: .*a/b.* -> .*a/c"):
        continued(Recipe(**values(dataset, "hub:a/c", steps=4)), folder)


def test_weights_of_another_dtype_than_said_are_planned_anew(dataset, finished, hub, tmp_path):
    hub.folder = in_dtype(finished, tmp_path / "half", torch.bfloat16)
    plan = modicum.plan(Recipe(**values(dataset)))
    config = json.loads((hub.folder / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    with pytest.raises(InputError, match=r"model\.path.*says F32.*the weights are BF16"):
        with_weights(plan, Ranks())
    assert with_weights(modicum.plan(Recipe(**values(dataset))), Ranks()).inputs.weights


def test_what_fails_names_the_field(dataset, hub):
    hub.error = ValueError("no")
    with pytest.raises(InputError, match=r"model\.path: the hub's library cannot load it: no"):
        modicum.plan(Recipe(**values(dataset)))
    with pytest.raises(InputError, match=r"model\.path: names no model of the hub"):
        modicum.plan(Recipe(**values(dataset, "hub:a")))


def _trains_by_the_hub(
    ranks: Ranks, made: dict[str, Any], folder: Path, out: Path
) -> tuple[str, int]:
    """Train on a rank of its own stand-in; how often it asked for weights."""
    with pytest.MonkeyPatch.context() as patched:
        hub = stand_in(patched, folder, out.parent / "cache")
        said = trains(ranks, made, out)
        return said, sum("model.safetensors" in names for names in hub.asked)


@pytest.mark.ranks
@pytest.mark.expensive
def test_ranks_take_turns(pool: Pool, dataset, finished, tmp_path):
    made = values(dataset)
    found = pool.run(
        _trains_by_the_hub, made, finished / "model", tmp_path / "run", ranks=2, timeout=90
    )
    assert [said for said, _ in found] == ["done", "done"]
    assert all(times == 1 for _, times in found)
